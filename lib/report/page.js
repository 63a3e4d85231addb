"use strict";
// The views of the report. All data are texts of models, people and files: they go into the page as text nodes only.
// The address (#view=…&d=17&turn=3) is the state of the page: every view is drawn from it, so that links and the
// browser's back button work.

// ---------------------------------------------------------------------------------------------------------------------
// data

const $ = id => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
const { methods: METHODS, tasks: TASKS, dialogues: DIALOGUES } = DATA;
const STATES = DATA.states || [], FORMS = { advantages: [], candidates: [], ...DATA.forms };
const IMAGES = new Map(Object.entries(DATA.images || {}));
const SHOWN_CHARACTERS = 5000, ROWS_A_PAGE = 100;

const given = value => value !== undefined && value !== null && value !== false;
const BY_TASK = TASKS.map(() => []);
DIALOGUES.forEach((d, number) => {
  d.number = number;
  d.agent = d.turns.flatMap((turn, place) => turn.who === "agent" ? [place] : []);      // where its agent turns are
  d.rounds = d.agent.length;
  const advantages = d.agent.map(place => d.turns[place].advantage);
  if (advantages.length && advantages.every(given)) d.advantage = advantages.reduce((sum, value) => sum + value, 0);
  BY_TASK[d.t].push(number);
});
const ADVANTAGES = DIALOGUES.flatMap(d => d.agent.map(place => d.turns[place].advantage)).filter(given);
const SIZES = ADVANTAGES.map(Math.abs).sort((a, b) => a - b);
const FULL_BAR = SIZES.length ? SIZES[Math.floor(0.99 * (SIZES.length - 1))] || 1 : 1;  // a few turns are beyond
const most = (items, valueOf, least) => items.reduce((best, item) => Math.max(best, valueOf(item)), least);
const SUMS = most(DIALOGUES, d => Math.abs(d.advantage || 0), 1e-9);       // Math.max(...) takes 100,000 values at most

const won = d => d.reward === 1;
const verdict = d => DATA.graded ? "" : won(d) ? "good" : "bad";                         // the look of a badge
const counted = number => number.toLocaleString("en-US");
const several = (number, word) => `${counted(number)} ${word}${number === 1 ? "" : "s"}`;
const signed = (value, digits = 3) => (value < 0 ? "\u2212" : "+") + Math.abs(value).toFixed(digits);
const tick = yes => yes ? "\u2713 " : "\u2717 ";
const rewardText = d => !given(d.reward) ? "no number" : DATA.graded ? d.reward.toFixed(3) : tick(won(d)) + Number(d.reward.toFixed(2));
const nameOf = d => METHODS[d.m] + (d.run ? `, run ${d.run + 1}` : "") + (d.sample ? `, sample ${d.sample + 1}` : "");
const firstLine = text => text.split("\n", 1)[0].slice(0, 200);
const sorted = values => [...new Set(values)].sort((a, b) => a > b ? 1 : -1);
const KINDS = sorted(DIALOGUES.flatMap(d => d.turns.map(turn => turn.kind)).filter(Boolean));
const MEANINGS = {
  "no.": "number of the dialogue in this page", reward: "share of the tests that the answer passes",
  rounds: "turns of the agent", advantage: "sum of the turn advantages", "turn by turn": "the advantage of each turn",
  rank: "by the critic's score, 1 the best", pairs: "in how many of the training pairs it is chosen or rejected",
  kind: "what a question or an answer is worth, by the task's facts", tokens: "length of the turn",
  call: "a test: a call of the function", expected: "what the reference returns", got: "what the answer returns",
};
if (DATA.graded) MEANINGS.reward = "how alike the answer and the reference are, 1 the most";

// ---------------------------------------------------------------------------------------------------------------------
// elements

/** An element; attributes that begin with "on" are listeners, children are elements or texts (never markup). */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (given(value)) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter(given));
  return node;
}

const badge = (text, kind = "", title) => el("span", { class: `badge ${kind}`, title }, text);
const note = text => el("p", { class: "note" }, text);
const link = (changes, text, attributes = {}) => el("a", { href: address(changes), ...attributes }, text);
const cell = (...children) => el("td", {}, ...children);
const numberCell = text => el("td", { class: "num" }, text);
const headings = (...texts) =>
  el("thead", {}, el("tr", {}, texts.map(text => el("th", { scope: "col", title: MEANINGS[text] }, text))));

/** The titles of headings as text: a finger cannot hover, and a narrow screen hides the heads of some tables. */
function legend(part) {
  const line = th => `${th.textContent.replace(/ [\u25B4\u25BE]$/, "")}: ${th.title}`;   // without the arrow of the order
  const lines = new Set([...part.querySelectorAll("th[title]")].map(line));
  return el("details", { class: "legend" }, el("summary", {}, "what the columns mean"), [...lines].map(note));
}

/** A text of a dialogue. A long one is cut on the screen, with a button that shows the rest. */
function textBlock(text, name = "div", className = "text") {
  const node = el(name, { class: className, dir: "auto", tabindex: name === "pre" && "0" });
  if (text.length <= SHOWN_CHARACTERS) {
    node.append(text);
    return node;
  }
  const half = /[\uD800-\uDBFF]/.test(text[SHOWN_CHARACTERS - 1]);                      // of an emoji
  node.append(text.slice(0, SHOWN_CHARACTERS - half) + "\u2026");
  const characters = text.length - (text.match(/[\uD800-\uDBFF][\uDC00-\uDFFF]/g) || []).length;
  const more = el("button", { type: "button", class: "more", onclick: () => {
    node.textContent = text;
    more.remove();
  } }, `show all ${counted(characters)} characters`);
  return el("div", {}, node, more);
}

/** A bar from the middle: to the right and "+" above 0, to the left, striped and "−" below. */
function advantageBar(value, full = FULL_BAR) {
  const width = Math.min(50, 50 * Math.abs(value) / full).toFixed(1);
  return el("span", { class: `advantage ${value < 0 ? "minus" : "plus"}` },
    el("span", { class: "track", "aria-hidden": "true" },
      el("span", { class: "fill", style: `${value < 0 ? "right" : "left"}:50%;width:${width}%` })),
    el("span", { class: "number" }, signed(value)));
}

/** The advantages of all turns of a dialogue over its rounds, small: one element, as a list has hundreds. */
function strip(d) {
  const bars = d.agent.flatMap((place, round) => {
    const value = d.turns[place].advantage || 0, height = Math.min(12, 12 * Math.abs(value) / FULL_BAR).toFixed(1);
    const color = value < 0 ? "var(--minus)" : "var(--plus)", top = value < 0 ? 12 : 12 - height;
    return `linear-gradient(${color},${color}) ${9 * round}px ${top}px/8px ${height}px no-repeat`;
  });
  return el("span", { class: "strip", "aria-hidden": "true", style: `width:${9 * bars.length}px;background:${bars}` });
}

/** The same, large: each bar is a link to its turn. */
function linkedStrip(d) {
  return el("span", { class: "bars" }, d.agent.map((place, round) => {
    const value = d.turns[place].advantage;
    if (value === undefined) return null;
    const height = Math.min(50, 50 * Math.abs(value) / FULL_BAR).toFixed(1);
    return link({ turn: place }, el("span", { class: value < 0 ? "down" : "up", style: `height:${height}%` }),
      { "data-round": round + 1, title: signed(value), "aria-label": `round ${round + 1}, advantage ${signed(value)}` });
  }));
}

/** A labelled select; options: [[value, text], …]. What is chosen becomes a part of the address. */
function choice(id, label, key, options, changes = {}) {
  const select = el("select", { id, onchange: () => go({ page: null, ...changes, [key]: select.value }) },
    options.map(([value, text]) => el("option", { value }, text)));
  select.value = state[key] || "";
  return el("label", {}, label, " ", select);
}

const button = (id, text, onclick, enabled = true) =>
  el("button", { type: "button", id, onclick, disabled: !enabled }, text);

/** Buttons to what comes before and after, for keys j and k: `there(-1)`, `there(1)` say whether there is one. */
const moves = (id, what, there) => [button(`${id}-back`, `\u2190 previous${what}`, () => next(-1), there(-1)),
  button(`${id}-on`, `next${what} \u2192`, () => next(1), there(1))];

/** Buttons to the pages of a list. */
function pager(count, size) {
  const page = pageOf(count, size), last = Math.ceil(count / size) - 1;
  if (last <= 0) return null;
  const range = `${counted(page * size + 1)} to ${counted(Math.min(count, (page + 1) * size))} of ${counted(count)}`;
  return el("nav", { class: "pager", "aria-label": "Pages of the list" },
    button("page-back", "\u2190 previous", () => go({ page: page - 1 || null }), page > 0), el("span", {}, range),
    button("page-on", "next \u2192", () => go({ page: page + 1 }), page < last));
}

const pageOf = (count, size) => Math.max(0, Math.min(Number(state.page || 0), Math.ceil(count / size) - 1));
const onPage = (items, size) => items.slice(pageOf(items.length, size) * size).slice(0, size);

function picture(key, caption) {
  const data = IMAGES.get(key) || "";
  return el("figure", {}, data.startsWith("data:image/") ? el("img", { src: data, alt: caption }) :
    el("div", { class: "none" }, "no screenshot in this page"), el("figcaption", {}, caption));
}

/** Screenshots of reference and answer: side by side, and over each other with a slider. */
function comparison(d) {
  const reference = TASKS[d.t].image, shots = [picture(reference, "reference"), picture(d.image, "answer")];
  if (!IMAGES.has(reference) || !IMAGES.has(d.image)) return el("div", { class: "shots" }, shots);
  const stack = el("div", { class: "stack" }, picture(reference, "").firstChild, picture(d.image, "").firstChild);
  const slide = value => { stack.lastChild.style.clipPath = `inset(0 0 0 ${value}%)`; };
  slide(50);
  const range = el("input", { type: "range", min: 0, max: 100, value: 50, oninput: () => slide(range.value),
    "aria-label": "place of the border between reference and answer" });
  return el("div", { class: "shots" }, shots, el("figure", {}, stack, range,
    el("figcaption", {}, "left of the border the reference, right of it the answer")));
}

// ---------------------------------------------------------------------------------------------------------------------
// the address is the state

let state = {}, drawn = null;
const lastOf = {};                                                  // the last address of each view, for the navigation

function parse() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const key of ["d", "turn", "t", "s", "page"]) if (!/^\d{1,9}$/.test(found[key] || "0")) delete found[key];
  if (!found.view) found.view = found.d !== undefined ? "dialogues" : found.s !== undefined ? "candidates" : "results";
  if (!VIEWS[found.view] || !$(found.view) || (found.view === "candidates" && !STATES.length)) found.view = "results";
  if (!DIALOGUES[found.d]) delete found.d;
  return found;
}

function address(changes) {
  const next = { ...state, ...changes };
  if ((next.d ?? "") !== "" && next.view === "dialogues") delete next.view;               // #d=17 is short
  const pairs = Object.entries(next).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return "#" + new URLSearchParams(pairs.sort(([a], [b]) => ORDER.indexOf(a) - ORDER.indexOf(b)));
}
const ORDER = "view d turn t pick s m reward family rounds kind side q what sort page".split(" ");
const fresh = changes => ({ ...Object.fromEntries(ORDER.map(key => [key, null])), ...changes });

/** Change the state; `replace`: without a new entry in the browser's history. */
function go(changes, replace = false) {
  const hash = address(changes);
  if (replace) location.replace(hash);
  else location.hash = hash;
  show();
}

function show() {
  if (drawn === location.hash) return;
  const before = state;
  drawn = location.hash;
  state = parse();
  lastOf[state.view] = drawn || "#view=results";
  const focus = document.activeElement && document.activeElement.id;
  for (const view of Object.keys(VIEWS)) if ($(view)) $(view).hidden = view !== state.view;
  for (const tab of $("nav").children) {
    const view = tab.dataset.view, current = view === state.view;
    tab.toggleAttribute("aria-current", false);
    if (current) tab.setAttribute("aria-current", "page");
    tab.href = !current && lastOf[view] || `#view=${view}`;
  }
  if (before.view && before.view !== state.view) {                    // an id stands once in the page
    if (before.view === "dialogues") $("dialogue").replaceChildren();
    else if (["compare", "candidates"].includes(before.view)) $(before.view).replaceChildren();
  }
  VIEWS[state.view](before);
  if (focus && document.activeElement === document.body && $(focus)) $(focus).focus({ preventScroll: true });
}

// ---------------------------------------------------------------------------------------------------------------------
// dialogues: filters, the list, one dialogue

let texts = null;                                                   // of each dialogue in small letters, made once

const FILTERS = {
  m: (d, value) => METHODS[d.m] === value,
  reward: (d, value) => DATA.graded ? Math.max(0, Math.min(3, Math.floor(d.reward * 4))) === Number(value) :
    won(d) === (value === "success"),
  family: (d, value) => TASKS[d.t].family === value,
  rounds: (d, value) => d.rounds === Number(value),
  kind: (d, value) => d.turns.some(turn => turn.kind === value || (value === "~cut" && turn.cut) ||
    (value === "~leak" && turn.leak)),
  q: (d, value) => {
    const textOf = one => [TASKS[one.t].id, ...one.turns.map(turn => turn.text)].join("\n").toLowerCase();
    texts = texts || DIALOGUES.map(textOf);
    return texts[d.number].includes(value.toLowerCase());
  },
};
const SORTS = {
  number: d => d.number, method: d => d.m, task: d => TASKS[d.t].id, request: d => TASKS[d.t].request,
  family: d => TASKS[d.t].family || "",
  reward: d => d.reward, rounds: d => d.rounds, advantage: d => d.advantage === undefined ? -Infinity : d.advantage,
  __proto__: null,
};
let chosen = { key: null, list: [] };

/** The dialogues that the filters leave, in their order. Kept until a filter or the order changes. */
function selection() {
  const active = Object.keys(FILTERS).filter(key => state[key]);
  const key = JSON.stringify([active.map(name => [name, state[name]]), state.sort]);
  if (chosen.key !== key) {
    const list = DIALOGUES.filter(d => active.every(name => FILTERS[name](d, state[name])));
    const order = SORTS[(state.sort || "").replace("-", "")];
    const sign = (state.sort || "").startsWith("-") ? -1 : 1;
    if (order) {
      list.sort((a, b) => {
        const [x, y] = [order(a), order(b)];
        return x === y ? a.number - b.number : x > y ? sign : -sign;
      });
    }
    chosen = { key, list };
  }
  return chosen.list;
}

function filterBar() {
  const families = sorted(TASKS.map(task => task.family).filter(Boolean));
  const rewards = DATA.graded ? [["3", "0.75 to 1"], ["2", "0.5 to 0.75"], ["1", "0.25 to 0.5"], ["0", "below 0.25"]] :
    [["success", "\u2713 success"], ["failed", "\u2717 failed"]];
  const special = [["~cut", "cut turn"], ["~leak", "reply that leaks"]].filter(([value]) =>
    DIALOGUES.some(d => FILTERS.kind(d, value)));
  const each = (values, any = "all") => [["", any], ...values.map(value => [String(value), String(value)])];
  const kinds = [...each(KINDS, "any"), ...special];
  const search = el("input", { type: "search", id: "f-q", placeholder: "words in the dialogue", autocomplete: "off",
    oninput: () => go({ q: search.value, page: null }, true) });
  const closed = { d: null, turn: null };
  return el("form", { class: "filters", role: "search", onsubmit: event => event.preventDefault() },
    choice("f-m", "method", "m", each(METHODS), closed),
    choice("f-reward", "reward", "reward", [["", "all"], ...rewards], closed),
    families.length ? choice("f-family", "family", "family", each(families), closed) : null,
    choice("f-rounds", "rounds", "rounds", each(sorted(DIALOGUES.map(d => d.rounds))), closed),
    kinds.length > 1 ? choice("f-kind", "kind of turn", "kind", kinds, closed) : null,
    el("label", {}, "text ", search),
    button("f-reset", "reset", () => go(fresh({ view: "dialogues" }))));
}

/** Saves the dialogues that the filters leave, a row each, with their tasks. */
function download() {
  const rows = selection().map(({ m, t, number, agent, image, ...d }) => ({ method: METHODS[m], task: TASKS[t], ...d }));
  const text = rows.map(one => JSON.stringify(one) + "\n").join("");
  el("a", { href: URL.createObjectURL(new Blob([text])), download: "dialogues.jsonl" }).click();
}

function row(d, withAdvantage) {
  const opened = { d: d.number, turn: null }, task = TASKS[d.t];
  return el("tr", { "aria-current": String(d.number) === state.d && "true",
    onclick: event => event.target.closest("a") || go(opened) },
    el("td", { class: "num extra" }, String(d.number)), cell(METHODS[d.m]),
    el("td", { class: "extra", title: task.id }, task.id),
    el("th", { scope: "row", dir: "auto" },
      link(opened, [task.family && el("span", { class: "short" }, `${task.family}: `),
        firstLine(task.request) || "(no text)"], { class: "open", id: `open-${d.number}` })),
    el("td", { class: "extra" }, task.family || ""), numberCell(rewardText(d)),
    el("td", { class: "num extra" }, String(d.rounds)),
    withAdvantage && numberCell(given(d.advantage) ? signed(d.advantage, 2) : ""),
    withAdvantage && el("td", { class: "extra" }, strip(d)));
}

function drawList() {
  const list = selection(), withAdvantage = ADVANTAGES.length > 0;
  const by = (state.sort || "number").replace("-", ""), down = (state.sort || "").startsWith("-");
  const column = (order, className, text = order) => {
    const onclick = () => go({ sort: by === order && !down ? "-" + order : order, page: null });
    return el("th", { scope: "col", class: `c-${order} ${className}`, title: MEANINGS[text],
      "aria-sort": by === order && (down ? "descending" : "ascending") },
      el("button", { type: "button", id: `sort-${order}`, onclick }, text,
        el("span", { "aria-hidden": "true" }, by !== order ? "" : down ? " \u25BE" : " \u25B4")));
  };
  const table = el("table", { class: "rows" },
    el("thead", {}, el("tr", {}, column("number", "num extra", "no."), column("method", ""), column("task", "extra"),
      column("request", ""), column("family", "extra"), column("reward", "num"), column("rounds", "num extra"),
      withAdvantage && column("advantage", "num"),
      withAdvantage && el("th", { scope: "col", class: "c-strip extra", title: MEANINGS["turn by turn"] },
        "turn by turn"))),
    el("tbody", {}, onPage(list, ROWS_A_PAGE).map(d => row(d, withAdvantage))));
  const counter = `${counted(list.length)} of ${counted(DIALOGUES.length)} dialogues`;
  if ($("counter").textContent !== counter) $("counter").textContent = counter;
  $("list").replaceChildren(el("div", { class: "scroll" }, table), pager(list.length, ROWS_A_PAGE) || "");
}

function drawDialogues(before) {
  const section = $("dialogues");
  if (!section.firstChild) {
    section.append(filterBar(), el("div", { class: "filters" }, el("span", { id: "counter", role: "status" }),
      button("f-download", "download as JSONL", download)), DATA.left_out ? note(DATA.left_out) : "",
      el("div", { id: "browser" }, el("div", { id: "list" }),
        el("article", { id: "dialogue", "aria-label": "The open dialogue" })));
  }
  for (const key of Object.keys(FILTERS)) {
    const control = $(`f-${key}`);
    if (control && control.value !== (state[key] || "")) control.value = state[key] || "";
  }
  const d = DIALOGUES[state.d], place = selection().indexOf(d);
  if (state.page === undefined && place >= ROWS_A_PAGE) state.page = String(Math.floor(place / ROWS_A_PAGE));
  drawList();
  if (!section.querySelector(":scope > .legend")) $("browser").before(legend($("list")));
  $("browser").classList.toggle("open", Boolean(d));
  $("dialogue").hidden = !d;
  $("dialogue").replaceChildren(...d ? dialogue(d) : []);
  const current = d && $(`open-${d.number}`);
  if (current) $("list").scrollTop = current.closest("tr").offsetTop - $("list").clientHeight / 2;
  const turn = d && $(`turn-${d.number}-${state.turn}`);
  if (turn) turn.scrollIntoView({ block: "center" });
  else if (d && state.d !== before.d) $("dialogue").scrollIntoView({ block: "nearest" });
  if (d && before.view === "dialogues" && state.d !== before.d) $("dialogue-title").focus({ preventScroll: true });
  if (!d && before.d && $(`open-${before.d}`)) $(`open-${before.d}`).focus();
}

/** What stands over a dialogue: method, reward, rounds. */
const facts = d => el("p", { class: "about" }, badge(nameOf(d), "method"),
  badge(`reward ${rewardText(d)}`, verdict(d)), badge(several(d.rounds, "round")),
  badge(`task ${TASKS[d.t].id}`), TASKS[d.t].family && badge(TASKS[d.t].family),
  d.known !== undefined && badge(`${tick(d.known)}${d.known ? "" : "not "}all known before the answer`));

/** Reference and hidden facts; CSS shows them when the switch is on. `d`: ticks off what was learned in it. */
function secrets(task, d) {
  const learned = {};
  if (d) d.turns.forEach((turn, place) => (turn.learned || []).forEach(fact => {
    learned[fact] = d.agent.filter(agent => agent < place).length;
  }));
  const fact = (text, number) => {
    const open = d && learned[number] === undefined;
    return el("li", { class: open ? "open" : "" }, d && (open ? "\u25CB " : "\u2713 "),
      el("span", { dir: "auto" }, text),
      d && el("span", { class: "muted" }, open ? " not learned" : ` learned in round ${learned[number]}`));
  };
  return el("div", { class: "secret" }, el("h3", {}, "Reference (c), hidden from the agent"),
    textBlock(task.reference || "", "pre"), task.facts && el("ul", { class: "facts" }, task.facts.map(fact)),
    task.image && d && comparison(d));
}

/** One turn: who, what it says, its advantage. `known`: the numbers of the facts that are known before it, added to. */
function turnCard(d, place, known) {
  const turn = d.turns[place], agent = turn.who === "agent", all = TASKS[d.t].facts || [];
  const answer = agent && place === d.agent[d.agent.length - 1] && d.answer ? turn.text.lastIndexOf(d.answer) : -1;
  const said = answer < 0 ? textBlock(turn.text) :
    [answer > 0 && textBlock(turn.text.slice(0, answer).trimEnd()), textBlock(d.answer, "pre", "text answer")];
  const learned = (turn.learned || []).map(fact => {
    known.add(fact);
    return el("p", { class: "secret learned" }, "\u2713 learned: ",
      el("span", { dir: "auto" }, all[fact] || String(fact)), ` (${known.size} of ${all.length} known)`);
  });
  const named = state.turn === String(place) && state.d === String(d.number) ? "named" : "";
  return el("div", { class: `turn ${agent ? "agent" : "user"} ${named}`, id: `turn-${d.number}-${place}` },
    el("p", { class: "who" }, el("b", {}, turn.who), agent && ` round ${d.agent.indexOf(place) + 1}`,
      turn.tool && badge(turn.tool), turn.kind && badge(turn.kind, "kind"),
      turn.tokens && el("span", { class: "muted" }, several(turn.tokens, "token")),
      turn.cut && badge("\u2702 cut by the token limit", "bad"),
      turn.fault && badge(`\u26A0 this page cannot be rendered: ${turn.fault}`, "bad"),
      turn.leak && badge(`\u26A0 shows the reference: ${turn.leak}`, "bad"),
      link(fresh({ view: "dialogues", d: d.number, turn: place }), "#" + place,
        { class: "anchor", "aria-label": `link to turn ${place}` })),
    el("div", { class: "said" }, said, learned),
    given(turn.advantage) && advantageBar(turn.advantage));
}

function failedTests(d) {
  const table = el("table", { class: "tests" }, headings("call", "expected", "got", "what the scorer said"),
    el("tbody", {}, d.failed.map(test => el("tr", {}, el("th", { scope: "row" }, textBlock(test.call, "code")),
      cell(textBlock(test.expected, "code")), cell(given(test.got) ? textBlock(test.got, "code") : "nothing"),
      cell(test.said || "")))));
  return [el("div", { class: "scroll" }, table), legend(table)];
}

function dialogue(d) {
  const list = selection(), place = list.indexOf(d), task = TASKS[d.t], known = new Set();
  const where = place < 0 ? "not in the list" : `${counted(place + 1)} of ${counted(list.length)}`;
  return [
    el("p", { class: "moves" }, moves("dialogue", "", step => place >= 0 && list[place + step]),
      el("span", { class: "muted" }, where),
      BY_TASK[d.t].length > 1 && link(fresh({ view: "compare", t: d.t }), "compare the methods on this task"),
      button("dialogue-close", "close", () => go({ d: null, turn: null }))),
    el("h2", { id: "dialogue-title", tabindex: "-1", dir: "auto" }, firstLine(task.request)), facts(d),
    given(d.advantage) && el("div", { class: "sum" }, linkedStrip(d),
      el("p", {}, "sum of the turn advantages ", advantageBar(d.advantage, SUMS)),
      note("Bars that are down and striped: advantages below 0."), FORMS.advantages.map(note)),
    secrets(task, d),
    el("div", { class: "turns" }, d.turns.map((_, number) => turnCard(d, number, known))),
    d.fault && note(`\u26A0 the answer cannot be rendered: ${d.fault}`),
    d.failed && d.failed.length > 0 &&
      el("details", {}, el("summary", {}, `failed tests (${d.failed.length} of ${d.num_failed})`), failedTests(d)),
  ].flat().filter(given);
}

// ---------------------------------------------------------------------------------------------------------------------
// compare: the methods on one task, turn by turn

/** The tasks that the choice above the comparison leaves. */
function comparedTasks() {
  return [...TASKS.keys()].filter(t => {
    const wins = BY_TASK[t].filter(number => won(DIALOGUES[number])).length, all = BY_TASK[t].length;
    return all > 1 && (state.what !== "differ" || (wins > 0 && wins < all)) && (state.what !== "failed" || wins === 0);
  });
}

function drawCompare() {
  const list = comparedTasks(), t = TASKS[state.t] ? Number(state.t) : list[0];
  const outcomes = DATA.graded ? [] : [["differ", "some succeed, some fail"], ["failed", "all fail"]];
  const bar = el("div", { class: "filters" },
    choice("c-what", "tasks", "what", [["", "all"], ...outcomes], { t: null, pick: null }));
  if (t === undefined) return $("compare").replaceChildren(bar, note("No task has two dialogues of this kind."));
  const place = list.indexOf(t), task = TASKS[t];
  const own = METHODS.map((_, m) => BY_TASK[t].filter(number => DIALOGUES[number].m === m));
  const asked = (state.pick || "").split(",").filter(Boolean).map(Number).filter(number => BY_TASK[t].includes(number));
  const picks = asked.length ? asked : own.flatMap(numbers => numbers.slice(0, 1));
  bar.append(...own.flatMap((numbers, m) => numbers.length ? [methodBox(numbers, m, picks)] : []),
    ...moves("task", " task", step => list[place + step] !== undefined),
    el("span", { class: "muted" }, place < 0 ? "" : `${counted(place + 1)} of ${counted(list.length)} tasks`));
  const shown = picks.map(number => DIALOGUES[number]), known = shown.map(d => new Set(d.turns[0].learned));
  const columns = el("div", { class: "columns", style: `--columns:${shown.length}` }, shown.map(d =>
    el("div", { class: "head" }, link(fresh({ view: "dialogues", d: d.number }), el("b", {}, nameOf(d))), " ",
      badge(rewardText(d), verdict(d)), badge(several(d.rounds, "round")),
      given(d.advantage) && advantageBar(d.advantage, SUMS), given(d.advantage) && strip(d))));
  for (let turn = 1; turn < Math.max(...shown.map(d => d.turns.length)); turn++) {
    columns.append(...shown.map((d, column) => d.turns[turn] ?
      el("div", { class: "cell" }, el("span", { class: "narrow" }, nameOf(d)), turnCard(d, turn, known[column])) :
      el("div", { class: "cell none", "aria-label": "the dialogue has ended" })));
  }
  $("compare").replaceChildren(bar, DATA.left_out ? note(DATA.left_out) : "", badge(`task ${task.id}`),
    el("h2", { class: "request" }, textBlock(task.request)), secrets(task), columns);
}

/** Whether a method is compared, and which of its dialogues where the task has several. */
function methodBox(numbers, m, picks) {
  const isOwn = number => numbers.includes(number), picked = picks.some(isOwn);
  const pick = chosen => go({ t: DIALOGUES[numbers[0]].t, pick: chosen.join(",") });
  const box = el("input", { type: "checkbox", id: `c-${m}`, checked: picked, disabled: picks.every(isOwn),
    onchange: () => pick([...picks.filter(number => !isOwn(number)), ...box.checked ? [numbers[0]] : []]
      .sort((a, b) => a - b)) });
  const which = el("select", { id: `c-which-${m}`, "aria-label": `dialogue of ${METHODS[m]}`,
    onchange: () => pick(picks.map(number => isOwn(number) ? Number(which.value) : number)) },
    numbers.map(number => el("option", { value: number, selected: picks.includes(number) },
      `${nameOf(DIALOGUES[number]).slice(METHODS[m].length + 2) || "first"} ${rewardText(DIALOGUES[number])}`)));
  return el("span", { class: "pick" }, el("label", {}, box, " ", METHODS[m]), numbers.length > 1 && picked && which);
}

// ---------------------------------------------------------------------------------------------------------------------
// candidates of a state

const isAsked = candidate => (!state.kind || candidate.kind === state.kind) &&
  (!state.side || candidate[state.side] > 0);

/** The numbers of the states in which a candidate is left by the filters. */
const askedStates = () => [...STATES.keys()].filter(number => STATES[number].candidates.some(isAsked));

function candidateTable(one) {
  const ranked = [...one.candidates].sort((a, b) => b.advantage - a.advantage);
  const withKind = ranked.some(candidate => candidate.kind), whole = ranked.filter(one => one.ended !== false);
  const half = ranked.indexOf(whole[Math.ceil(whole.length / 2)]);
  const full = Math.max(1e-9, ...ranked.map(candidate => Math.abs(candidate.advantage)));
  const mark = (count, text, kind) => count > 0 && badge(count > 1 ? `${text} \u00D7${count}` : text, kind);
  const names = ["rank", "score", "pairs", ...(withKind ? ["kind"] : []), "tokens", "text"];
  const line = (candidate, rank) => isAsked(candidate) && named(names, el("tr", { class: rank === half ? "half" : "" },
    el("th", { scope: "row" }, String(rank + 1)), cell(advantageBar(candidate.advantage, full)),
    cell(mark(candidate.chosen, "\u25B2 chosen", "chosen"), mark(candidate.rejected, "\u25BC rejected", "rejected")),
    withKind && cell(candidate.kind || ""), numberCell(given(candidate.tokens) ? String(candidate.tokens) : ""),
    cell(candidate.ended === false && badge("\u2702 cut", "bad"), textBlock(candidate.text))));
  const table = el("table", { class: "candidates" }, headings(...names),
    el("tbody", {}, ranked.map(line).filter(Boolean)));
  return el("div", { class: "scroll" }, table, legend(table));
}

/** Give each cell of a row the name of its column, which a narrow screen shows in place of the table's head. */
function named(names, row) {
  names.forEach((name, place) => { row.children[place].dataset.heading = name; });
  return row;
}

/** A link to the dialogue that a state is of, where this page has it. */
function dialogueOf(one) {
  const number = BY_TASK[one.t].find(number => DIALOGUES[number].sample === one.sample &&
    one.history.every((turn, place) => DIALOGUES[number].turns[place]?.text === turn.text));
  if (number === undefined) return el("span", { class: "muted" }, `of sample ${one.sample + 1}, not in this page`);
  return link(fresh({ view: "dialogues", d: number, turn: one.history.length }), "open its dialogue");
}

function drawCandidates() {
  const list = askedStates(), number = STATES[state.s] ? Number(state.s) : list[0] ?? 0;
  const one = STATES[number], task = TASKS[one.t], place = list.indexOf(number);
  const round = one.history.filter(turn => turn.who === "agent").length + 1;
  const kinds = sorted(STATES.flatMap(other => other.candidates.map(candidate => candidate.kind)).filter(Boolean));
  const named = values => [["", "all"], ...values.map(value => [value, value])];
  $("candidates").replaceChildren(
    el("div", { class: "filters" }, kinds.length > 0 && choice("k-kind", "kind", "kind", named(kinds), { s: null }),
      choice("k-side", "pairs", "side", named(["chosen", "rejected"]), { s: null }),
      moves("state", " state", step => list[place + step] !== undefined),
      el("span", { class: "muted" }, `${counted(place + 1)} of ${counted(list.length)} states`)),
    el("p", { class: "lead" }, "The policy wrote these turns for one state, and the critic ranked them. A pair has a " +
      "chosen turn \u25B2 of the better half and a rejected turn \u25BC of the worse half. " +
      "The double line parts the halves."), ...FORMS.candidates.map(note),
    el("h2", { dir: "auto" }, firstLine(task.request)),
    el("p", { class: "about" }, badge(`task ${task.id}`), badge(`round ${round}`), dialogueOf(one)),
    secrets(task),
    el("details", { open: true }, el("summary", {}, `the dialogue so far (${several(one.history.length, "turn")})`),
      one.history.map(turn => el("div", { class: `turn ${turn.who === "agent" ? "agent" : "user"}` },
        el("p", { class: "who" }, el("b", {}, turn.who)), el("div", { class: "said" }, textBlock(turn.text))))),
    candidateTable(one));
}

// ---------------------------------------------------------------------------------------------------------------------
// keys, and the start

const VIEWS = { results: () => {}, dialogues: drawDialogues, compare: drawCompare, advantages: () => {},
  candidates: drawCandidates };

/** To the next (1) or previous (-1) dialogue, task or state; in a list, to the next row. */
function next(step) {
  if (state.view === "dialogues" && state.d) {
    const list = selection(), to = list[list.indexOf(DIALOGUES[state.d]) + step];
    if (to) go({ d: to.number, turn: null, page: Math.floor(list.indexOf(to) / ROWS_A_PAGE) || null });
  } else if (state.view === "compare") {
    const list = comparedTasks(), to = list[(state.t === undefined ? 0 : list.indexOf(Number(state.t))) + step];
    if (to !== undefined) go({ t: to, pick: null });
  } else if (state.view === "candidates") {
    const list = askedStates(), to = list[(state.s === undefined ? 0 : list.indexOf(Number(state.s))) + step];
    if (to !== undefined) go({ s: to });
  } else {
    const links = [...$(state.view).querySelectorAll("a.open")], at = links.indexOf(document.activeElement);
    const to = links[at < 0 ? 0 : at + step];
    if (to) to.focus();
  }
}

const KEYS = { j: 1, ArrowRight: 1, ArrowDown: 1, k: -1, ArrowLeft: -1, ArrowUp: -1 };

document.addEventListener("keydown", event => {
  const typing = event.target.closest("input:not([type=checkbox]), select, dialog");
  const arrow = event.key.startsWith("Arrow");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing) {
    if (event.key === "Escape" && !event.target.closest("dialog")) event.target.blur();
    return;
  }
  const inList = state.view === "dialogues" && !state.d;
  if (KEYS[event.key] && !(arrow && event.target.closest("pre, .scroll[tabindex]"))) {
    if (/Up|Down/.test(event.key) && !inList) return;                                   // they scroll
    next(KEYS[event.key]);
  } else if (event.key === "Escape" && state.d && state.view === "dialogues") go({ d: null, turn: null });
  else if (event.key === "r") $("secrets").click();
  else if (event.key === "?") $("help").showModal();
  else if (event.key === "/") {
    if (state.view !== "dialogues") go(fresh({ view: "dialogues" }));
    $("f-q").focus();
  } else return;
  event.preventDefault();
});

$("secrets").addEventListener("change", () => document.body.classList.toggle("with-secrets", $("secrets").checked));
$("secrets").checked = false;
$("help-button").addEventListener("click", () => $("help").showModal());
$("help-close").addEventListener("click", () => $("help").close());
if (DATA.left_out) $("left-out").textContent = DATA.left_out;
$("left-out").hidden = !DATA.left_out;
for (const id of ["nav", "switch", "help-button"]) $(id).hidden = false;
for (const tab of [...$("nav").children]) if (tab.dataset.view === "candidates" && !STATES.length) tab.remove();
for (const part of document.querySelectorAll("#results > .scroll, #advantages > .pair")) part.after(legend(part));
window.addEventListener("hashchange", show);
show();

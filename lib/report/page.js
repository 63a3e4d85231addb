"use strict";
// The views of the report. All data are texts of models, people and files: they go into the page as text nodes only.
// The address (#view=…&d=17&turn=3) is the state of the page: every view is drawn from it, so that links and the
// browser's back button work.

// --- data
const $ = id => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
const { methods: METHODS, tasks: TASKS, dialogues: DIALOGUES, states: STATES } = DATA;
const SHOWN_CHARACTERS = 5000, ROWS_A_PAGE = 100;
const MEANINGS = {
  "no.": "number of the dialogue in this page", rounds: "turns of the agent",
  reward: DATA.graded ? "score of the answer, 1 the best" : "share of the tests that the answer passes",
  advantage: "sum of the turn advantages", "turn by turn": "the advantage of each turn",
  rank: "by the critic's score, 1 the best", pairs: "in how many of the training pairs it is chosen or rejected",
  kind: "what a question or an answer is worth, by the task's facts", tokens: "length of the turn",
  call: "a test: a call of the function", expected: "what the solution returns", got: "what the answer returns",
};

const given = value => value !== undefined && value !== null && value !== false;
const ascending = (x, y) => x === y ? 0 : x > y ? 1 : -1;
// without what is not there: undefined, "", false
const distinct = values => [...new Set(values)].filter(value => value || value === 0).sort(ascending);
const BY_TASK = TASKS.map(() => []);                                  // the dialogues of each task
DIALOGUES.forEach((d, number) => {
  d.number = number;
  d.agent = [...d.turns.keys()].filter(place => d.turns[place].who === "agent");        // where its agent turns are
  d.rounds = d.agent.length;
  d.advantages = d.agent.map(place => d.turns[place].advantage);
  if (d.rounds && d.advantages.every(given)) d.advantage = d.advantages.reduce((sum, value) => sum + value, 0);
  BY_TASK[d.t].push(d);
});
const SIZES = DIALOGUES.flatMap(d => d.advantages).filter(given).map(Math.abs).sort(ascending);
const FULL_BAR = SIZES[Math.floor(0.99 * (SIZES.length - 1))] || 1;                     // a few turns are beyond
const FULL_SUM = DIALOGUES.reduce((most, d) => Math.max(most, Math.abs(d.advantage || 0)), 1e-9);

const won = d => d.reward === 1;
const verdict = d => DATA.graded ? "" : won(d) ? "good" : "bad";                        // the look of a badge
const counted = number => number.toLocaleString("en-US");
const several = (number, word) => `${counted(number)} ${word}${number === 1 ? "" : "s"}`;
const signed = (value, digits = 3) => (value < 0 ? "\u2212" : "+") + Math.abs(value).toFixed(digits);
const tick = yes => yes ? "\u2713 " : "\u2717 ";
const rewardText = d => !given(d.reward) ? "no number" :
  DATA.graded ? d.reward.toFixed(3) : tick(won(d)) + Number(d.reward.toFixed(2));
const nameOf = d => METHODS[d.m] + (d.run ? `, run ${d.run + 1}` : "") + (d.sample ? `, sample ${d.sample + 1}` : "");
const firstLine = text => text.split("\n", 1)[0].slice(0, 200);

// --- elements
/** Replace what an element holds by elements and texts (never markup), without those that are not given. */
const fill = (node, ...children) => node.replaceChildren(...children.flat(Infinity).filter(given));

/** An element: el("p.note", {title: "…"}, child, …). Attributes may be left out; those with "on" are listeners. */
function el(selector, ...children) {
  const [name, ...classes] = selector.split("."), node = document.createElement(name);
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  node.classList.add(...classes.filter(Boolean));
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (given(value)) node.setAttribute(key, value === true ? "" : value);
  }
  fill(node, children);
  return node;
}

const badge = (text, look = "") => el(`span.badge.${look}`, text);
const muted = text => el("span.muted", text);
const note = text => el("p.note", text);
const link = (changes, text, attributes) => el("a", { href: address(changes), ...attributes }, text);
const button = (id, text, onclick, attributes) => el("button", { type: "button", id, onclick, ...attributes }, text);

/** The titles of headings as text: a finger cannot hover, and a narrow screen hides the heads of some tables. */
function legend(part) {
  const lines = [...part.querySelectorAll("th[title]")].map(th => `${th.textContent}: ${th.title}`);
  return el("details.legend", el("summary", "what the columns mean"), [...new Set(lines)].map(note));
}

/** A table that scrolls where it is too wide, and what its headings mean. rows: [[content of a cell, …], …]. */
function tableOf(look, headings, rows) {
  const head = headings.map(text => el("th", { scope: "col", title: MEANINGS[text] }, text));
  const cell = (content, place) => el(place ? "td" : "th", { scope: !place && "row",
    "data-heading": headings[place] }, content);                    // a narrow screen shows it in the cell
  const body = rows.map(row => el("tr", row.map(cell)));
  const table = el(`table.${look}`, el("thead", el("tr", head)), el("tbody", body));
  return el("div.scroll", table, legend(table));
}

/** A text of a dialogue. A long one is cut on the screen, with a button that shows the rest. */
function textBlock(text, name = "div") {
  const node = el(`${name}.text`, { dir: "auto", tabindex: name === "pre" && "0" }, text);
  if (text.length <= SHOWN_CHARACTERS) return node;
  fill(node, text.slice(0, SHOWN_CHARACTERS).replace(/[\uD800-\uDBFF]$/, ""), "\u2026");     // not half an emoji
  const more = button(null, `show all ${counted([...text].length)} characters`, () => {
    fill(node, text);
    more.remove();
  }, { class: "more" });
  return el("div", node, more);
}

/** A bar from the middle: to the right and "+" above 0, to the left, striped and "−" below. */
function advantageBar(value, full = FULL_BAR) {
  const width = Math.min(50, 50 * Math.abs(value) / full).toFixed(1);
  const bar = el("span.fill", { style: `${value < 0 ? "right" : "left"}:50%;width:${width}%` });
  return el(`span.advantage.${value < 0 ? "minus" : "plus"}`, el("span.track", { "aria-hidden": "true" }, bar),
    el("span.number", signed(value)));
}

/** The advantages of all turns of a dialogue over its rounds, small: one element, as a list has hundreds. */
function strip(d) {
  const bars = d.advantages.map((value = 0, round) => {
    const height = Math.min(12, 12 * Math.abs(value) / FULL_BAR).toFixed(1);
    const color = value < 0 ? "var(--minus)" : "var(--plus)", top = value < 0 ? 12 : 12 - height;
    return `linear-gradient(${color},${color}) ${9 * round}px ${top}px/8px ${height}px no-repeat`;
  });
  return el("span.strip", { "aria-hidden": "true", style: `width:${9 * bars.length}px;background:${bars}` });
}

/** The same, large: each bar is a link to its turn. */
function linkedStrip(d) {
  return el("span.bars", d.advantages.map((value, round) => {
    const height = Math.min(50, 50 * Math.abs(value) / FULL_BAR).toFixed(1), title = signed(value);
    return link({ turn: d.agent[round] }, el(`span.${value < 0 ? "down" : "up"}`, { style: `height:${height}%` }),
      { "data-round": round + 1, title, "aria-label": `round ${round + 1}, advantage ${title}` });
  }));
}

/** A labelled select of "all" and options, [value, text] or value. Its id ends with the key of the address it sets. */
function choice(id, label, options, all = "all") {
  const key = id.slice(2);                                          // f-kind: kind
  const option = ([value, text = value]) => el("option", { value }, text);
  const select = el("select", { id, onchange: () => go({ ...CLOSED, page: null, [key]: select.value }) },
    option(["", all]), options.map(one => option([one].flat())));
  select.value = state[key] || "";
  return el("label", label, " ", select);
}

/** Buttons (keys k and j) to what stands before and after `item` in a list, and its place; changesTo(item): address. */
function moves(id, name, list, item, changesTo) {
  const place = list.indexOf(item), end = name && `${name}s`;
  const move = (side, text, step) => button(`${id}-${side}`, text, () => go(changesTo(list[place + step])),
    { "data-step": step, disabled: list[place + step] === undefined });
  return [move("back", `\u2190 previous${name}`, -1), move("on", `next${name} \u2192`, 1),
    muted(place < 0 ? "not in the list" : `${counted(place + 1)} of ${counted(list.length)}${end}`)];
}

/** Screenshots of solution and answer: side by side, and over each other with a slider. */
function comparison(d) {
  const [solution, answer] = [TASKS[d.t].image, d.image].map(name => DATA.images[name]);
  const shot = (src, alt, style) => src ? el("img", { src, alt, style }) : el("div.none", "no screenshot in this page");
  const figure = (caption, ...parts) => el("figure", parts, el("figcaption", caption));
  const over = shot(answer, "", "clip-path:inset(0 0 0 50%)");
  const slider = el("input", { type: "range", min: 0, max: 100, value: 50,
    "aria-label": "place of the border between solution and answer",
    oninput: () => { over.style.clipPath = `inset(0 0 0 ${slider.value}%)`; } });
  return el("div.shots", figure("solution", shot(solution, "solution")), figure("answer", shot(answer, "answer")),
    solution && answer && figure("left of the border the solution, right of it the answer",
      el("div.stack", shot(solution, ""), over), slider));
}

// --- the address is the state
let state = {}, drawn = null;
const lastOf = {};                                                  // the last address of each view, for the navigation
const EMPTY = Object.fromEntries("view d turn t pick s m reward family rounds kind side q what sort page".split(" ")
  .map(key => [key, null]));
const fresh = changes => ({ ...EMPTY, ...changes });
const CLOSED = { d: null, turn: null, t: null, pick: null, s: null };

function parse() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const key of ["d", "turn", "t", "s", "page"]) if (!/^\d{1,9}$/.test(found[key] || "0")) delete found[key];
  found.view ||= found.d !== undefined ? "dialogues" : found.s !== undefined ? "candidates" : "results";
  if (!$(found.view)?.matches("main > section")) found.view = "results";
  if (!DIALOGUES[found.d]) delete found.d;
  return found;
}

function address(changes) {
  const next = { ...EMPTY, ...state, ...changes };
  if (next.view === "dialogues" && (next.d ?? "") !== "") next.view = null;             // #d=17 is short
  return "#" + new URLSearchParams(Object.entries(next).filter(([, value]) => (value ?? "") !== ""));
}

/** Change the state; `replace`: without a new entry in the browser's history. */
function go(changes, replace = false) {
  if (replace) location.replace(address(changes));
  else location.hash = address(changes);
  show();
}

function show() {
  if (drawn === location.hash) return;
  const before = state, focus = document.activeElement?.id;
  drawn = location.hash;
  state = parse();
  lastOf[state.view] = drawn || "#view=results";
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== state.view;
  for (const tab of $("nav").children) {
    const view = tab.dataset.view, current = view === state.view;
    tab.ariaCurrent = current ? "page" : null;
    tab.href = !current && lastOf[view] || `#view=${view}`;
  }
  if (before.view !== state.view) {                                   // an id stands once in the page
    for (const id of ["dialogue", "compare", "candidates"]) $(id)?.replaceChildren();
  }
  VIEWS[state.view]?.(before);
  if (focus && document.activeElement === document.body) $(focus)?.focus({ preventScroll: true });
}

// --- dialogues: filters, the list, one dialogue
const texts = [];                                                   // every letter that is typed asks for them
const textOf = d => texts[d.number] ??= [TASKS[d.t].id, ...d.turns.map(turn => turn.text)].join("\n").toLowerCase();
const REWARDS = DATA.graded ? [["3", "0.75 to 1"], ["2", "0.5 to 0.75"], ["1", "0.25 to 0.5"], ["0", "below 0.25"]] :
  [["success", "\u2713 success"], ["failed", "\u2717 failed"]];
const rewardClass = d => DATA.graded ? Math.max(0, Math.min(3, Math.floor(d.reward * 4))) :
  won(d) ? "success" : "failed";

/** The filters of the list: what can be chosen, by default all that dialogues have, and what a dialogue has of it. */
const FILTERS = [
  { key: "m", label: "method", options: METHODS, valuesOf: d => [METHODS[d.m]] },
  { key: "reward", label: "reward", options: REWARDS, valuesOf: d => [rewardClass(d)] },
  { key: "family", label: "family", valuesOf: d => [TASKS[d.t].family] },
  { key: "rounds", label: "rounds", valuesOf: d => [d.rounds] },
  { key: "kind", label: "kind of turn", all: "any",
    valuesOf: d => d.turns.flatMap(turn => [turn.kind, turn.cut && "~cut", turn.leak && "~leak"]) },
];

/** The columns of the list: what a cell shows, and what it is sorted by where that is another. */
const COLUMNS = [
  { key: "number", heading: "no.", look: ".num.extra", content: d => d.number },
  { key: "method", look: "", content: d => METHODS[d.m], order: d => d.m },
  { key: "task", look: ".extra", content: d => TASKS[d.t].id },
  { key: "request", look: "", content: opening, order: d => TASKS[d.t].request },
  { key: "family", look: ".extra", content: d => TASKS[d.t].family || "" },
  { key: "reward", look: ".num", content: rewardText, order: d => d.reward },
  { key: "rounds", look: ".num.extra", content: d => d.rounds },
];
if (SIZES.length > 0) COLUMNS.push(
  { key: "advantage", look: ".num", content: d => given(d.advantage) && signed(d.advantage, 2),
    order: d => d.advantage ?? -Infinity },
  { key: "strip", heading: "turn by turn", look: ".extra", content: strip, order: null });

/** The column that the list is sorted by, and 1, or -1 where the largest comes first. */
function sorting() {
  const [, sign, key] = (state.sort || "number").match(/^(-?)(.*)/);
  return [COLUMNS.find(column => column.key === key), sign ? -1 : 1];
}

/** The dialogues that the filters leave, in their order. */
function selection() {
  const active = FILTERS.filter(({ key }) => state[key]), words = (state.q || "").toLowerCase();
  const keeps = d => ({ key, valuesOf }) => valuesOf(d).some(value => String(value) === state[key]);
  const list = DIALOGUES.filter(d => active.every(keeps(d)) && (!words || textOf(d).includes(words)));
  const [column, sign] = sorting();
  const { content, order = content } = column || {};
  return order ? list.sort((a, b) => sign * ascending(order(a), order(b))) : list;
}
let listed = [];                                                    // the selection that is drawn

function filterBar() {
  const text = { "~cut": "cut turn", "~leak": "reply that leaks", __proto__: null };
  const choices = FILTERS.map(({ key, label, valuesOf, all, options = distinct(DIALOGUES.flatMap(valuesOf)) }) =>
    options.length > 0 && choice(`f-${key}`, label, options.map(one => text[one] ? [one, text[one]] : one), all));
  const search = el("input", { type: "search", id: "f-q", placeholder: "words in the dialogue", autocomplete: "off",
    oninput: () => go({ q: search.value, page: null }, true) });
  return el("form.filters", { role: "search", onsubmit: event => event.preventDefault() }, choices,
    el("label", "text ", search), button("f-reset", "reset", () => go(fresh({ view: "dialogues" }))));
}

/** Save the dialogues that the filters leave, a row each, with their tasks. */
function download() {
  const row = ({ m, t, number, agent, advantages, image, ...d }) => ({ method: METHODS[m], task: TASKS[t], ...d });
  const text = listed.map(d => JSON.stringify(row(d)) + "\n").join("");
  el("a", { href: URL.createObjectURL(new Blob([text])), download: "dialogues.jsonl" }).click();
}

/** The request of a dialogue, as a link that opens it. */
function opening(d) {
  const { family, request } = TASKS[d.t], short = family && el("span.short", `${family}: `);
  return link({ d: d.number, turn: null }, [short, firstLine(request) || "(no text)"],
    { class: "open", id: `open-${d.number}` });
}

function row(d) {
  const cells = COLUMNS.map(({ key, look, content }) => key === "request" ?
    el("th", { scope: "row", dir: "auto" }, content(d)) :
    el(`td${look}`, { title: key === "task" && TASKS[d.t].id }, content(d)));
  return el("tr", { "aria-current": String(d.number) === state.d && "true",
    onclick: event => event.target.closest("a") || go({ d: d.number, turn: null }) }, cells);
}

function heading(column) {
  const { key, look, heading: text = key, order } = column, [by, sign] = sorting();
  const direction = by === column && (sign < 0 ? "descending" : "ascending");
  const onclick = () => go({ sort: direction === "ascending" ? `-${key}` : key, page: null });
  return el(`th.c-${key}${look}`, { scope: "col", title: MEANINGS[text], "aria-sort": direction },
    order === null ? text : button(`sort-${key}`, text, onclick));
}

function drawList() {
  const count = listed.length, last = Math.max(0, Math.ceil(count / ROWS_A_PAGE) - 1);
  const page = Math.min(state.page || 0, last), first = page * ROWS_A_PAGE;
  const rows = listed.slice(first, first + ROWS_A_PAGE);
  const range = `${counted(first + 1)} to ${counted(first + rows.length)} of ${counted(count)}`;
  const pager = el("nav.pager", { "aria-label": "Pages of the list" },
    button("page-back", "\u2190 previous", () => go({ page: page - 1 || null }), { disabled: page === 0 }),
    el("span", range), button("page-on", "next \u2192", () => go({ page: page + 1 }), { disabled: page === last }));
  const table = el("table.rows", el("thead", el("tr", COLUMNS.map(heading))), el("tbody", rows.map(row)));
  fill($("list"), el("div.scroll", table), last > 0 && pager);
  const counter = `${counted(count)} of ${counted(DIALOGUES.length)} dialogues`;
  if ($("counter").textContent !== counter) fill($("counter"), counter);                 // it is read aloud
}

function drawDialogues(before) {
  listed = selection();
  const d = DIALOGUES[state.d], place = listed.indexOf(d);
  for (const control of $("dialogues").querySelectorAll("form :is(select, input)")) {
    control.value = state[control.id.slice(2)] || "";
  }
  if (state.page === undefined && place >= ROWS_A_PAGE) state.page = Math.floor(place / ROWS_A_PAGE);
  drawList();
  $("browser").classList.toggle("open", Boolean(d));
  $("dialogue").hidden = !d;
  fill($("dialogue"), d && dialogue(d));
  const opener = $(`open-${d ? d.number : before.d}`), turn = d && $(`turn-${d.number}-${state.turn}`);
  const isOther = d && state.d !== before.d;
  if (d && opener) $("list").scrollTop = opener.closest("tr").offsetTop - $("list").clientHeight / 2;
  if (turn) turn.scrollIntoView({ block: "center" });
  else if (isOther) $("dialogue").scrollIntoView({ block: "nearest" });
  if (isOther && before.view === "dialogues") $("dialogue-title").focus({ preventScroll: true });
  if (!d && before.d) opener?.focus();
}

/** The solution and the hidden facts; CSS shows them when the switch is on. `d`: ticks off what was learned in it. */
function secrets(task, d) {
  const fact = (text, number) => {
    const place = d?.turns.findIndex(turn => turn.learned?.includes(number)), isOpen = place < 0;
    const round = d?.agent.filter(agent => agent < place).length;
    return el(`li.${isOpen ? "open" : ""}`, d && (isOpen ? "\u25CB " : "\u2713 "), el("span", { dir: "auto" }, text),
      d && muted(isOpen ? " not learned" : ` learned in round ${round}`));
  };
  return el("div.secret", el("h3", "Solution (c), hidden from the agent"), textBlock(task.solution || "", "pre"),
    task.facts && el("ul.facts", task.facts.map(fact)), task.image && d && comparison(d));
}

/** The box of a turn: who speaks and more about it, what is said, the advantage. */
const box = ({ who, advantage }, attributes, about, ...said) => el(`div.turn.${who}`, attributes,
  el("p.who", el("b", who), about), el("div.said", said), given(advantage) && advantageBar(advantage));

/** One turn. `known`: the numbers of the facts that are known before it, added to. */
function turnCard(d, place, known) {
  const turn = d.turns[place], round = d.agent.indexOf(place) + 1, facts = TASKS[d.t].facts || [];
  const answer = round > 0 && round === d.rounds && d.answer ? turn.text.lastIndexOf(d.answer) : -1;
  const said = answer < 0 ? textBlock(turn.text) :
    [answer > 0 && textBlock(turn.text.slice(0, answer).trimEnd()), textBlock(d.answer, "pre")];
  const learned = (turn.learned || []).map(fact => {
    known.add(fact);
    return el("p.secret.learned", "\u2713 learned: ", el("span", { dir: "auto" }, facts[fact] || String(fact)),
      ` (${known.size} of ${facts.length} known)`);
  });
  const about = [round > 0 && ` round ${round}`, turn.tool && badge(turn.tool), turn.kind && badge(turn.kind, "kind"),
    turn.tokens && muted(several(turn.tokens, "token")), turn.cut && badge("\u2702 cut by the token limit", "bad"),
    turn.fault && badge(`\u26A0 this page cannot be rendered: ${turn.fault}`, "bad"),
    turn.leak && badge(`\u26A0 shows the solution: ${turn.leak}`, "bad"),
    link(fresh({ view: "dialogues", d: d.number, turn: place }), `#${place}`,
      { class: "anchor", "aria-label": `link to turn ${place}` })];
  const card = box(turn, { id: `turn-${d.number}-${place}` }, about, said, learned);
  card.classList.toggle("named", state.turn === String(place) && state.d === String(d.number));
  return card;
}

/** An open dialogue: its place in the list, its numbers, what was hidden, its turns, the tests that failed. */
function dialogue(d) {
  const task = TASKS[d.t], known = new Set();
  const changesTo = one => ({ d: one.number, turn: null, page: Math.floor(listed.indexOf(one) / ROWS_A_PAGE) || null });
  const code = text => textBlock(text, "code");
  const tests = (d.failed || []).map(({ call, expected, got, said }) =>
    [code(call), code(expected), given(got) ? code(got) : "nothing", said]);
  return [
    el("p.moves", moves("dialogue", "", listed, d, changesTo),
      BY_TASK[d.t].length > 1 && link(fresh({ view: "compare", t: d.t }), "compare the methods on this task"),
      button("dialogue-close", "close", () => go(CLOSED))),
    el("h2", { id: "dialogue-title", tabindex: "-1", dir: "auto" }, firstLine(task.request)),
    el("p.about", badge(nameOf(d), "method"), badge(`reward ${rewardText(d)}`, verdict(d)),
      badge(several(d.rounds, "round")), badge(`task ${task.id}`), task.family && badge(task.family),
      d.known !== undefined && badge(`${tick(d.known)}${d.known ? "" : "not "}all known before the answer`)),
    given(d.advantage) && el("div.sum", linkedStrip(d),
      el("p", "sum of the turn advantages ", advantageBar(d.advantage, FULL_SUM)),
      note("Bars that are down and striped: advantages below 0."), DATA.forms.advantages?.map(note)),
    secrets(task, d), el("div.turns", d.turns.map((_, place) => turnCard(d, place, known))),
    d.fault && note(`\u26A0 the answer cannot be rendered: ${d.fault}`),
    tests.length > 0 && el("details", el("summary", `failed tests (${tests.length} of ${d.num_failed})`),
      tableOf("tests", ["call", "expected", "got", "what the scorer said"], tests)),
  ];
}

// --- compare: the methods on one task, turn by turn
/** The tasks that the choice above the comparison leaves. */
function comparedTasks() {
  return [...TASKS.keys()].filter(t => {
    const all = BY_TASK[t].length, wins = BY_TASK[t].filter(won).length;
    return all > 1 && (state.what !== "differ" || (wins > 0 && wins < all)) && (state.what !== "failed" || wins === 0);
  });
}

function drawCompare() {
  const list = comparedTasks(), t = TASKS[state.t] ? Number(state.t) : list[0], task = TASKS[t];
  const outcomes = DATA.graded ? [] : [["differ", "some succeed, some fail"], ["failed", "all fail"]];
  const what = choice("c-what", "tasks", outcomes);
  if (!task) return fill($("compare"), el("div.filters", what), note("No task has two dialogues of this kind."));
  const methods = METHODS.map((_, m) => BY_TASK[t].filter(d => d.m === m)).filter(dialogues => dialogues.length > 0);
  const asked = (state.pick || "").split(",").map(number => BY_TASK[t].find(d => String(d.number) === number));
  const picks = asked.some(given) ? asked.filter(given) : methods.map(([first]) => first);
  const heads = picks.map(d => el("div.head", link(fresh({ view: "dialogues", d: d.number }), el("b", nameOf(d))), " ",
    badge(rewardText(d), verdict(d)), badge(several(d.rounds, "round")),
    given(d.advantage) && [advantageBar(d.advantage, FULL_SUM), strip(d)]));
  const columns = el("div.columns", { style: `--columns:${picks.length}` }, heads);
  const known = picks.map(d => new Set(d.turns[0].learned));
  for (let turn = 1; turn < Math.max(...picks.map(d => d.turns.length)); turn++) {
    columns.append(...picks.map((d, column) => d.turns[turn] ?
      el("div.cell", el("span.narrow", nameOf(d)), turnCard(d, turn, known[column])) :
      el("div.cell.none", { "aria-label": "the dialogue has ended" })));
  }
  return fill($("compare"), el("div.filters", what, methods.map(dialogues => methodBox(dialogues, picks)),
    moves("task", " task", list, t, to => ({ t: to, pick: null }))), DATA.left_out && note(DATA.left_out),
    badge(`task ${task.id}`), el("h2.request", textBlock(task.request)), secrets(task), columns);
}

/** Whether a method is compared, and which of its dialogues on the task where it has several. */
function methodBox(dialogues, picks) {
  const { m, t } = dialogues[0], others = picks.filter(d => d.m !== m), isPicked = others.length < picks.length;
  const pick = chosen => go({ t, pick: chosen.map(d => d.number).join(",") });
  const box = el("input", { type: "checkbox", id: `c-${m}`, checked: isPicked, disabled: others.length === 0,
    onchange: () => pick(box.checked ? [...others, dialogues[0]].sort((a, b) => a.number - b.number) : others) });
  const text = d => `${nameOf(d).slice(METHODS[m].length + 2) || "first"} ${rewardText(d)}`;
  const which = el("select", { id: `c-which-${m}`, "aria-label": `dialogue of ${METHODS[m]}`,
    onchange: () => pick(picks.map(d => d.m === m ? dialogues[which.selectedIndex] : d)) },
    dialogues.map(d => el("option", { value: d.number, selected: picks.includes(d) }, text(d))));
  return el("span.pick", el("label", box, " ", METHODS[m]), dialogues.length > 1 && isPicked && which);
}

// --- candidates of a state
const isAsked = ({ kind, ...sides }) => (!state.kind || kind === state.kind) && (!state.side || sides[state.side] > 0);

function candidateTable(candidates) {
  const ranked = [...candidates].sort((a, b) => b.advantage - a.advantage), asked = ranked.filter(isAsked);
  const whole = ranked.filter(candidate => candidate.ended !== false), half = whole[Math.ceil(whole.length / 2)];
  const full = Math.max(1e-9, ...ranked.map(candidate => Math.abs(candidate.advantage)));
  const mark = (count, text, look) => count > 0 && badge(count > 1 ? `${text} \u00D7${count}` : text, look);
  const kinds = ranked.some(candidate => candidate.kind) ? ["kind"] : [];
  const table = tableOf("candidates", ["rank", "score", "pairs", ...kinds, "tokens", "text"], asked.map(candidate => [
    ranked.indexOf(candidate) + 1, advantageBar(candidate.advantage, full),
    [mark(candidate.chosen, "\u25B2 chosen", "chosen"), mark(candidate.rejected, "\u25BC rejected", "rejected")],
    ...kinds.map(() => candidate.kind), candidate.tokens,
    [candidate.ended === false && badge("\u2702 cut", "bad"), textBlock(candidate.text)]]));
  table.querySelectorAll("tbody tr")[asked.indexOf(half)]?.classList.add("half");
  return table;
}

/** A link to the dialogue that a state is of, where this page has it. */
function dialogueOf({ t, sample, history }) {
  const begins = d => d.sample === sample && history.every((turn, place) => d.turns[place]?.text === turn.text);
  const d = BY_TASK[t].find(begins);
  return d ? link(fresh({ view: "dialogues", d: d.number, turn: history.length }), "open its dialogue") :
    muted(`of sample ${sample + 1}, not in this page`);
}

function drawCandidates() {
  const list = [...STATES.keys()].filter(number => STATES[number].candidates.some(isAsked));
  const number = STATES[state.s] ? Number(state.s) : list[0] ?? 0, one = STATES[number], task = TASKS[one.t];
  const round = one.history.filter(turn => turn.who === "agent").length + 1;
  const kinds = distinct(STATES.flatMap(other => other.candidates.map(candidate => candidate.kind)));
  fill($("candidates"),
    el("div.filters", kinds.length > 0 && choice("k-kind", "kind", kinds),
      choice("k-side", "pairs", ["chosen", "rejected"]), moves("state", " state", list, number, s => ({ s }))),
    el("p.lead", "The policy wrote these turns for one state, and the critic ranked them. A pair has a chosen turn " +
      "\u25B2 of the better half and a rejected turn \u25BC of the worse half. The double line parts the halves."),
    DATA.forms.candidates?.map(note), el("h2", { dir: "auto" }, firstLine(task.request)),
    el("p.about", badge(`task ${task.id}`), badge(`round ${round}`), dialogueOf(one)), secrets(task),
    el("details", { open: true }, el("summary", `the dialogue so far (${several(one.history.length, "turn")})`),
      one.history.map(turn => box(turn, {}, null, textBlock(turn.text)))), candidateTable(one.candidates));
}

// --- keys, and the start
const VIEWS = { dialogues: drawDialogues, compare: drawCompare, candidates: drawCandidates };
const STEPS = { j: 1, ArrowRight: 1, ArrowDown: 1, k: -1, ArrowLeft: -1, ArrowUp: -1 };

/** To the next (1) or previous (-1) dialogue, task or state; in a list, to the next row. */
function next(step) {
  const move = document.querySelector(`[data-step="${step}"]`);
  if (move) return move.click();
  const links = [...$(state.view).querySelectorAll("a.open")], at = links.indexOf(document.activeElement);
  return links[at < 0 ? 0 : at + step]?.focus();
}

document.addEventListener("keydown", event => {
  const { key, target } = event, isList = state.view === "dialogues" && !state.d;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target.closest("input:not([type=checkbox]), select, dialog")) {
    if (key === "Escape" && !target.closest("dialog")) target.blur();
    return;
  }
  if (key.startsWith("Arrow") && target.closest("pre, .scroll[tabindex]")) return;      // it scrolls
  if (/Up|Down/.test(key) && !isList) return;
  if (STEPS[key]) next(STEPS[key]);
  else if (key === "Escape" && state.view === "dialogues" && state.d) go(CLOSED);
  else if (key === "r") $("secrets").click();
  else if (key === "?") $("help").showModal();
  else if (key === "/") {
    if (state.view !== "dialogues") go(fresh({ view: "dialogues" }));
    $("f-q").focus();
  } else return;
  event.preventDefault();
});

$("secrets").addEventListener("change", () => document.body.classList.toggle("with-secrets", $("secrets").checked));
$("secrets").checked = false;
$("help-button").addEventListener("click", () => $("help").showModal());
$("help-close").addEventListener("click", () => $("help").close());
$("f-download").addEventListener("click", download);
$("dialogues").prepend(filterBar());
$("browser").before(legend(el("tr", COLUMNS.map(heading))));
for (const part of document.querySelectorAll("#results > .scroll, #advantages > .pair")) part.after(legend(part));
window.addEventListener("hashchange", show);
show();

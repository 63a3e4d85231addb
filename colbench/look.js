// What the human sees of a rendered page: {aspect: [value, the share of the page's area that it covers]}. A colour
// is [red, green, blue]; null is what is not there. Parts are found by their tags, else by common class names, else by
// how they look.
(() => {
  const root = document.documentElement, body = document.body;
  const W = Math.max(root.clientWidth, 1), H = Math.max(root.scrollHeight, 1), white = [255, 255, 255];
  const box = e => e.getBoundingClientRect(), style = e => getComputedStyle(e);
  const size = e => box(e).width * box(e).height;
  const seen = e => box(e).width > 1 && box(e).height > 1 && style(e).visibility == "visible" && style(e).opacity > 0.1;
  const share = n => Math.round(1e4 * Math.min(1, Math.max(0, n / (W * H)))) / 1e4;
  const children = e => [...e.querySelectorAll(":scope > *")];    // of a form, .children may be its field of that name
  const all = selector => [...document.querySelectorAll(selector)].filter(seen);
  const first = (...selectors) => selectors.map(s => all(s)[0]).find(e => e);
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true}), known = {};
  const rgba = css => known[css] ??= (canvas.clearRect(0, 0, 1, 1), canvas.fillStyle = css, canvas.fillRect(0, 0, 1, 1),
                                      [...canvas.getImageData(0, 0, 1, 1).data]);
  const paint = e => {                                                    // its own colour; of a gradient the first one
    const gradient = style(e).backgroundImage.match(/gradient\(.*?((?:rgba?|hsla?|oklch|oklab|color)\([^)]*\))/);
    const colour = rgba(gradient ? gradient[1] : style(e).backgroundColor);
    return colour[3] > 127 ? colour.slice(0, 3) : null;
  };
  const under = e => { for (; e; e = e.parentElement) if (paint(e)) return paint(e); return white; };
  const cover = e => children(e).find(c => seen(c) && size(c) >= 0.9 * size(e) && (paint(c) || cover(c)));
  const surface = e => { while (cover(e) && !paint(e)) e = cover(e); return under(e); };
  const outer = e => !e.parentElement?.closest("article, section, main, aside");

  let ground = body;
  while (children(ground).some(c => seen(c) && size(c) >= 0.9 * W * H && (paint(c) || children(c).length)))
    ground = children(ground).find(c => seen(c) && size(c) >= 0.9 * W * H && (paint(c) || children(c).length));
  const background = under(ground);
  const nav = first("nav, [role=navigation]", ".nav, .navbar, .navigation, #nav, .menu");
  const aside = first("aside, [role=complementary]", "[class*=sidebar], [id*=sidebar]");
  const header = all("header, [role=banner], .header, #header").find(outer) || all("body *").find(e =>
    e != nav && outer(e) && box(e).top < 40 && box(e).width > 0.6 * W && box(e).height > 20 && size(e) < 0.45 * W * H &&
    paint(e) && "" + paint(e) != "" + background);
  const footer = all("footer, [role=contentinfo], .footer, #footer").find(outer);
  const largest = list => list.sort((a, b) => size(b) - size(a))[0];
  const button = largest(all("button, [role=button], input[type=submit], input[type=button]")) ||
    largest(all("[class*=btn], [class*=button]")) ||
    largest(all("a").filter(a => paint(a) && !a.closest("nav") && "" + paint(a) != "" + under(a.parentElement)));
  const free = e => !e.closest("header, nav, aside, footer");
  const tagged = "article, [class~=card], [class*=card-], [class*=-card]";
  let cards = all(tagged).filter(e => free(e) && !e.parentElement?.closest(tagged));
  if (cards.length < 2) {
    const groups = all("body, body *").filter(free).map(parent => {
      const kids = children(parent).filter(k =>
        seen(k) && free(k) && /^(DIV|LI|SECTION|FIGURE|A|TD)$/.test(k.tagName));
      const alike = kids.filter(k => k.tagName == kids[0].tagName && size(k) < 0.4 * W * H &&
                                     Math.abs(box(k).width / box(kids[0]).width - 1) < 0.2);
      const row = alike.some((k, i) => i && Math.abs(box(k).top - box(alike[0]).top) < 5);
      return alike.length > 1 && (row || alike.every(k => paint(k))) ? alike : [];
    });
    const total = list => list.reduce((sum, e) => sum + size(e), 0);
    cards = groups.sort((a, b) => total(b) - total(a))[0] || [];
  }
  const rows = cards.map(card => cards.filter(other => Math.abs(box(other).top - box(card).top) < 5).length);
  const area = cards.reduce((sum, card) => sum + size(card), 0);

  const texts = all("body *").map(e => {                                   // elements with text of their own
    const boxes = [...e.childNodes].filter(n => n.nodeType == 3 && n.data.trim()).map(n => {
      const range = document.createRange(); range.selectNodeContents(n); return range.getBoundingClientRect(); });
    return {e, area: boxes.reduce((sum, b) => sum + b.width * b.height, 0)};
  }).filter(text => text.area > 0);
  const kind = e => {
    const names = style(e).fontFamily.toLowerCase();
    return /mono|courier|consolas|menlo/.test(names) ? "monospace" : /cursive|comic|script/.test(names) ? "cursive" :
      /sans|system-ui|arial|helvetica|verdana|roboto|inter\b/.test(names) ? "sans-serif" :
      /serif|times|georgia|garamond|playfair/.test(names) ? "serif" : "sans-serif";
  };
  const fonts = {};
  for (const {e, area} of texts) fonts[kind(e)] = (fonts[kind(e)] || 0) + area;
  const font = Object.entries(fonts).sort((a, b) => b[1] - a[1])[0];
  const title = first("h1", "h2") || texts.map(text => text.e).sort((a, b) =>
    parseFloat(style(b).fontSize) - parseFloat(style(a).fontSize))[0];
  const words = e => (e.innerText || e.value || "").trim().replace(/\s+/g, " ");
  let place = null, line = 0;
  if (title) {
    const range = document.createRange(); range.selectNodeContents(title);
    const text = range.getBoundingClientRect(), frame = header && header.contains(title) ? box(header) : box(root);
    const left = text.left - frame.left, right = frame.right - text.right;
    const middle = Math.abs(left - right) < 0.1 * frame.width;
    place = middle ? "in the center" : left < right ? "on the left" : "on the right";
    line = text.width * text.height;
  }
  const pictures = all("img, video").filter(e => share(size(e)) > 0.002);
  const parts = [header, aside, footer, button, ...cards].filter(e => e).reduce((sum, e) => sum + size(e), 0);
  const part = (e, value) => [e ? value(e) : null, e ? share(size(e)) : 0];
  const middle = e => (box(e).left + box(e).right) / 2;
  return {
    background: [background, Math.max(0.05, share(W * H - parts))],
    header: part(header, surface), sidebar: part(aside, e => box(e).width > 0.7 * W ? "across the page" :
      middle(e) < W / 2 ? "on the left" : "on the right"), "sidebar colour": part(aside, surface),
    cards: [cards.length || null, share(area)], "card columns": [cards.length ? Math.max(...rows) : null, share(area)],
    "card colour": [cards.length ? surface(cards[0]) : null, share(area)],
    footer: part(footer, surface),
    pictures: [pictures.length || null, share(pictures.reduce((sum, e) => sum + size(e), 0))],
    navigation: part(nav, () => true), button: part(button, words), "button colour": part(button, surface),
    title: [title ? words(title) : null, share(line)], "title place": [place, share(line)],
    font: font ? [font[0], share(font[1])] : [null, 0],
  };
})()

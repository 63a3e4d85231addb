// The least contrast (WCAG) of the texts that a selector finds against what is behind them.
selector => {
  const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = color => {
    const [r, g, b] = color.match(/[\d.]+/g).map(value => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    const color = getComputedStyle(node).backgroundColor;
    return /, 0\)$/.test(color) ? behind(node.parentElement) : color;
  };
  const nodes = [...document.querySelectorAll(selector)].filter(node => node.offsetParent && node.innerText.trim());
  return Math.min(...nodes.map(node => {
    const pair = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  }));
}

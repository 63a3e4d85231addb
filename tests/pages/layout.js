[document.compatMode, document.title, scrollX, innerHeight, [...document.querySelectorAll('*')].map(x => {
    const s = getComputedStyle(x), r = x.getBoundingClientRect()
    return [x.tagName, r.x, r.y, r.width, r.height, s.color, s.backgroundColor, s.fontFamily, s.opacity]
})]

(async () => {
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  const show = image => { image.loading = "eager"; return image.decode(); };
  await Promise.allSettled([document.fonts.ready, ...[...document.images].map(show)]);
  for (const element of document.querySelectorAll("*"))            // drawn or not as the viewport happens to be
    if (getComputedStyle(element).contentVisibility === "auto") element.style.contentVisibility = "visible";
  for (const bar of document.querySelectorAll("progress:indeterminate")) bar.value = 0;        // it moves, endlessly
  let changes = 1;
  new MutationObserver(() => changes++).observe(
    document, {subtree: true, childList: true, attributes: true, characterData: true});
  while (changes) { changes = 0; await frame(); }
  for (let round = 0; round < 3; round++) {
    const moving = document.getAnimations().filter(animation => animation.playState === "running");
    for (const animation of moving) try {
      animation.finish();
      if (animation.timeline !== document.timeline) { animation.commitStyles(); animation.cancel(); }   // by scrolling
    } catch (endless) { animation.cancel(); }
    if (moving.length) await frame();
  }
  for (const svg of document.querySelectorAll("svg")) { svg.pauseAnimations(); svg.setCurrentTime(0); }
  document.activeElement?.style?.setProperty("caret-color", "transparent", "important");
  scrollTo({left: 0, top: 0, behavior: "instant"});
})()

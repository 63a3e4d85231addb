(async () => {
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  const show = async top => {                   // observers hear of it in the frame after
    scrollTo({left: 0, top, behavior: "instant"});
    for (let count = 0; count < 2; count++) await frame();
  };
  for (let top = 0; top < Math.min(document.documentElement.scrollHeight, %d); top += innerHeight) await show(top);
  await show(0);
})()

(() => {
  const start = 1735732800000, timers = new Map(), channel = new MessageChannel();
  const RealDate = Date, RealPromise = Promise;
  let now = 0, count = 0, seed = 1e9;
  const random = () => (seed = seed * 16807 % 2147483647) / 2147483647;
  const add = (call, ms, args, every) => {
    timers.set(++count, {at: now + Math.max(1, +ms || 0), call, args, every});
    return count;
  };
  const clear = id => { timers.delete(id); };
  const storage = () => Object.create({
    getItem(key) { return this[key] ?? null; }, setItem(key, value) { this[key] = `${value}`; },
    removeItem(key) { delete this[key]; }, clear() { for (const key in this) delete this[key]; },
    key(index) { return Object.keys(this)[index] ?? null; }, get length() { return Object.keys(this).length; }});
  RealDate.now = () => start + now;
  performance.now = () => now;
  performance.getEntries = performance.getEntriesByName = () => [];
  performance.getEntriesByType = type => type === "navigation" ? [new Proxy({}, {get: () => 0})] : [];
  Math.random = random;
  crypto.getRandomValues = array => array.map((_, index) => array[index] = random() * 4294967296) && array;
  Object.assign(window, {
    setTimeout: (call, ms, ...args) => add(call, ms, args),
    setInterval: (call, ms, ...args) => add(call, ms, args, Math.max(4, +ms || 0)),
    requestAnimationFrame: call => add(() => call(now), 16, []),
    requestIdleCallback: call => add(() => call({didTimeout: false, timeRemaining: () => 10}), 1, []),
    clearTimeout: clear, clearInterval: clear, cancelAnimationFrame: clear, cancelIdleCallback: clear,
    alert() {}, confirm: () => false, prompt: () => null, print() {}, open: () => null, close() {}, stop() {},
    RTCPeerConnection: undefined, webkitRTCPeerConnection: undefined, Temporal: undefined,
    Date: RealDate.prototype.constructor = new Proxy(RealDate, {
      construct: (target, args, made) => Reflect.construct(target, args.length ? args : [start + now], made),
      apply: () => new RealDate(start + now).toString()})});
  const Observer = IntersectionObserver;        // what has been scrolled to stays shown
  window.IntersectionObserver = class IntersectionObserver extends Observer {
    constructor(call, options) {
      super((entries, observer) => {
        const seen = entries.filter(entry => entry.isIntersecting);
        if (seen.length) call.call(observer, seen, observer);
      }, options);
    }
  };
  Object.defineProperty(Document.prototype, "lastModified", {value: "01/01/2025 12:00:00"});
  Object.defineProperty(performance, "timeOrigin", {value: start});
  Object.defineProperty(performance, "timing", {value: new Proxy({}, {get: () => start})});
  for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, {value: storage()});
  if (window === top) window.name = "";
  Object.defineProperty(window, "__run", {value: async until => {
    while (true) {
      await new RealPromise(turn => { channel.port1.onmessage = turn; channel.port2.postMessage(0); });
      let first, at = until + 1;
      for (const [id, timer] of timers) if (timer.at < at) [first, at] = [id, timer.at];
      if (!first) { now = until; return; }
      const {call, args, every} = timers.get(first);
      now = at;
      if (every) timers.get(first).at += every; else timers.delete(first);
      try { typeof call === "function" ? call.apply(window, args) : (0, eval)(`${call}`); } catch (error) {}
    }
  }});
})()

new Promise(loaded => {
  document.open(); addEventListener("load", () => loaded()); document.write(%s); document.close();
})

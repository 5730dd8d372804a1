(() => {
  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll("svg .band > title, svg .dot > title")) {
    title.parentNode.dataset.says = title.textContent;
    title.remove();
  }
  const show = (event) => {
    const says = event.target.dataset && event.target.dataset.says;
    tip.hidden = !says;
    if (!says) return;
    tip.textContent = says;
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const y = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, y) + "px";
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();

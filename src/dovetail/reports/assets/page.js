// Starts both pictures once the data is read.

(function start() {
  const data = JSON.parse(element("data").textContent);
  const repaint = [timelinePicture(data), graphPicture(data)];
  const all = () => repaint.forEach((paint) => paint());
  window.addEventListener("resize", all);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
})();

"use strict";
// Shared by both pictures. Names in the data are foreign: they reach the page as text only.

const NONE = -1;
const element = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

/** First index of the ascending `values` with values[i] > x, from `low` on. */
function firstAbove(values, x, low = 0) {
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}

function seconds(nanoseconds) {
  const size = Math.abs(nanoseconds);
  for (const [scale, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "us"]]) {
    if (size >= scale) return `${Number((nanoseconds / scale).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(nanoseconds)} ns`;
}

function bytes(count) {
  for (const [scale, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= scale) return `${Number((count / scale).toPrecision(3))} ${unit}`;
  }
  return `${count} B`;
}

function amount(count) {
  for (const [scale, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (count >= scale) return `${Number((count / scale).toPrecision(3))} ${unit}`;
  }
  return `${count} `;
}

/** Colours of the style sheet, read again when the colour scheme changes. */
function theme(devices = 0) {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const colours = { palette: [], devices: [] };
  for (const name of ["paper", "card", "ink", "soft", "line", "rule", "grid", "wait", "carry", "accent"]) {
    colours[name] = read(name);
  }
  for (let i = 0; i < 8; i++) colours.palette.push(read(`c${i}`));
  for (let i = 0; i < devices; i++) colours.devices.push(read(`d${i}`));
  return colours;
}

/** Black or white, whichever reads better on `colour` (#rrggbb). */
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#15181d" : "#ffffff";
}

function legend(place, entries) {
  place.replaceChildren(...entries.map(([text, colour]) => {
    const item = document.createElement("span");
    const mark = document.createElement("i");
    mark.style.background = colour;
    item.append(mark, text);
    return item;
  }));
}

function showTip(event, lines) {
  const tip = element("tip");
  tip.replaceChildren(...lines.map((text, i) => {
    const line = document.createElement(i ? "span" : "b");
    line.textContent = text;
    return line;
  }));
  tip.hidden = false;
  const x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(x, 4)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12}px`;
}

function hideTip() {
  element("tip").hidden = true;
}

/** Sizes a canvas to its box in device pixels; returns [context, width, height] in CSS pixels. */
function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

/** At most one drawing a frame, however many events ask for it. */
function onceAFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
}

/** Wheel, drag, clicks and keys, as `zoom(factor, x, y)`, `move(dx, dy)`, `hover(event, x, y)` and
    `press(x, y)`, which says whether there was something to press. */
function navigate(canvas, { zoom, move, hover, reset, press = () => false }) {
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let last = null, travelled = 0, pressed = false;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    hideTip();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return move(-event.deltaX, 0);
    const lines = event.deltaMode === 1 ? 30 : 1;
    return zoom(Math.exp(-clamp(event.deltaY * lines, -300, 300) / 400), ...at(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("drag");
    last = at(event);
    travelled = 0;
    hideTip();
  });
  canvas.addEventListener("pointermove", (event) => {
    const here = at(event);
    if (!last) return hover(event, ...here);
    travelled += Math.abs(here[0] - last[0]) + Math.abs(here[1] - last[1]);
    move(here[0] - last[0], here[1] - last[1]);
    last = here;
    return undefined;
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, () => { last = null; canvas.classList.remove("drag"); });
  }
  canvas.addEventListener("pointerleave", () => { hideTip(); hover(null, NONE, NONE); });
  canvas.addEventListener("click", (event) => { pressed = travelled < 4 && press(...at(event)); });
  canvas.addEventListener("dblclick", (event) => { if (!pressed) zoom(2.5, ...at(event)); });
  canvas.addEventListener("keydown", (event) => {
    const middle = [canvas.clientWidth / 2, canvas.clientHeight / 2];
    const keys = {
      ArrowLeft: () => move(80, 0), ArrowRight: () => move(-80, 0),
      ArrowUp: () => move(0, 60), ArrowDown: () => move(0, -60),
      "+": () => zoom(1.5, ...middle), "=": () => zoom(1.5, ...middle), "-": () => zoom(1 / 1.5, ...middle), 0: reset,
    };
    if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
}

// The timelines, one below the other on one axis.
//
// A row's spans are kept by *lane*: within a lane spans do not overlap, so that starts and ends
// both ascend and a binary search finds the visible ones. Where spans are narrower than a pixel,
// one bar a pixel stands for all that begin there, as high as the share of the pixel they fill.

const GUTTER = 132, AXIS = 24, TITLE = 26, DEVICE_ROW = 30, CHANNEL_ROW = 17, GAP = 4;

/** Undoes the packing of pictures.py: differences to values, rows to lanes. */
function unpackOps(ops) {
  const templates = Int32Array.from(ops.which), numbers = Int32Array.from(ops.numbers);
  const lastNumbers = new Int32Array(ops.templates.length);
  for (let i = 0, last = 0; i < templates.length; i++) {
    last = templates[i] += last;
    lastNumbers[last] = numbers[i] += lastNumbers[last];
  }
  const list = ops.templates.map((t) => ({ before: ops.strings[t[0]], after: ops.strings[t[1]], kind: ops.strings[t[2]], module: ops.strings[t[3]], phase: t[4] }));
  const of = (op) => list[templates[op]];
  return {
    templates, list, of,
    name: (op) => of(op).before + (numbers[op] >= 0 ? numbers[op] : "") + of(op).after,
  };
}

function unpackRow(row) {
  const count = row.ops.length;
  const starts = new Float64Array(count), ends = new Float64Array(count), ops = new Int32Array(count);
  const members = [], laneEnds = [];
  for (let i = 0, now = 0, op = 0; i < count; i++) {
    op += row.ops[i];
    ops[i] = op;
    starts[i] = now + row.gaps[i];
    now = ends[i] = starts[i] + row.lengths[i];
    let lane = laneEnds.findIndex((end) => end <= starts[i]);
    if (lane === NONE) lane = members.push([]) - 1;
    laneEnds[lane] = ends[i];
    members[lane].push(i);
  }
  const critical = new Uint8Array(count);
  for (let run = 0, at = 0; run < row.critical.length; at += row.critical[run++]) {
    critical.fill(run % 2, at, at + row.critical[run]);
  }
  const lanes = members.map((of) => {
    const filled = new Float64Array(of.length + 1);
    of.forEach((i, at) => { filled[at + 1] = filled[at] + ends[i] - starts[i]; });
    return {
      spans: Int32Array.from(of), filled,
      starts: Float64Array.from(of, (i) => starts[i]), ends: Float64Array.from(of, (i) => ends[i]),
    };
  });
  const height = row.kind === "device" ? DEVICE_ROW : CHANNEL_ROW;
  const busy = lanes.reduce((sum, lane) => sum + lane.filled[lane.filled.length - 1], 0);
  return { ...row, starts, ends, ops, critical, lanes, busy, height: Math.max(height, 9 * lanes.length) };
}

function timelinePicture(data) {
  const canvas = element("timeline");
  const ops = unpackOps(data.ops);
  const timelines = data.timelines.map((t) => ({ ...t, rows: t.rows.map(unpackRow) }));
  const whole = Math.max(1, ...timelines.map((t) => t.step));
  const state = { from: 0, to: whole, by: "phase", critical: false, found: null, hover: null };
  let colours, colourOf = [];

  let y = AXIS;
  for (const timeline of timelines) {
    timeline.top = y;
    y += TITLE;
    for (const row of timeline.rows) { row.top = y; y += row.height + GAP; }
    y += 10;
  }
  canvas.style.height = `${y}px`;

  const redraw = onceAFrame(draw);

  function paint() {
    colours = theme(data.devices.length);
    const palette = colours.palette;
    if (state.by === "device") {
      legend(element("legend"), [...data.devices.map((name, i) => [name, colours.devices[i]]), ["transfer", colours.carry]]);
      return;
    }
    const key = { phase: (t) => data.phases[t.phase], module: (t) => t.module.split(".").slice(0, 2).join(".") || "(top)", kind: (t) => t.kind }[state.by];
    const counts = new Map();
    for (const template of ops.templates) {
      const text = key(ops.list[template]);
      counts.set(text, (counts.get(text) || 0) + 1);
    }
    const fixed = { source: 7, forward: 4, backward: 1, update: 2 };
    const common = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
    const names = state.by === "phase" ? data.phases : common;
    const rank = new Map(names.map((name, i) => [name, i]));
    const index = (name) => (state.by === "phase" ? fixed[name] : Math.min(rank.get(name), 7));
    colourOf = ops.list.map((template) => palette[index(key(template))]);
    const used = new Set();
    for (const timeline of timelines) for (const row of timeline.rows) if (row.kind === "device") for (const op of row.ops) used.add(ops.templates[op]);
    const shown = new Set([...used].map((template) => key(ops.list[template])));
    const entries = names.filter((name) => shown.has(name)).slice(0, 7).map((name) => [name, palette[index(name)]]);
    if (shown.size > 7) entries.push([`${shown.size - 7} more`, palette[7]]);
    if (timelines.some((t) => t.rows.some((row) => row.kind === "channel"))) entries.push(["transfer", colours.carry]);
    legend(element("legend"), entries);
  }

  const scale = (width) => (width - GUTTER) / (state.to - state.from);

  function draw() {
    const [context, width] = prepare(canvas);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    drawAxis(context, width);
    for (const timeline of timelines) {
      context.fillStyle = colours.ink;
      context.font = "600 13px system-ui, sans-serif";
      context.fillText(`${timeline.name}  ${seconds(timeline.step)}`, 0, timeline.top + TITLE / 2);
      context.font = "12px system-ui, sans-serif";
      for (const row of timeline.rows) drawRow(context, row, timeline, width);
      const end = GUTTER + (timeline.step - state.from) * scale(width);
      if (end >= GUTTER && end <= width) {
        context.fillStyle = colours.ink;
        context.fillRect(end - 0.5, timeline.top + TITLE - 4, 1, timelineHeight(timeline));
      }
    }
  }

  function timelineHeight(timeline) {
    const last = timeline.rows[timeline.rows.length - 1];
    return last ? last.top + last.height - timeline.top - TITLE + 8 : 0;
  }

  function drawAxis(context, width) {
    const rough = (state.to - state.from) / Math.max((width - GUTTER) / 110, 1);
    const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-3)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    for (let t = Math.ceil(state.from / step) * step; t <= state.to; t += step) {
      const x = GUTTER + (t - state.from) * scale(width);
      context.fillStyle = colours.grid;
      context.fillRect(Math.round(x), AXIS - 4, 1, canvas.clientHeight);
      context.fillStyle = colours.soft;
      context.textAlign = x > width - 40 ? "right" : x < GUTTER + 20 ? "left" : "center";
      context.fillText(t ? axisText(t, step) : "0", x, 9);
    }
    context.textAlign = "left";
  }

  /** All marks in one unit, with as many decimals as tell them apart. */
  function axisText(t, step) {
    const [scale, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]].find(([size]) => state.to >= size || size === 1);
    return `${(t / scale).toFixed(clamp(-Math.floor(Math.log10(step / scale) + 1e-9), 0, 9))} ${unit}`;
  }

  function drawRow(context, row, timeline, width) {
    const middle = row.top + row.height / 2;
    context.fillStyle = row.kind === "device" ? colours.ink : colours.soft;
    if (row.kind === "device") {
      context.fillStyle = colours.devices[data.devices.indexOf(row.label)];
      context.fillRect(0, row.top, 4, row.height);
      context.fillStyle = colours.ink;
    }
    const share = timeline.step ? `${Math.round((100 * row.busy) / timeline.step)} %` : "";
    context.fillText(row.label, 10, middle, GUTTER - 54);
    context.textAlign = "right";
    context.fillStyle = colours.soft;
    context.fillText(share, GUTTER - 10, middle);
    context.textAlign = "left";
    context.fillStyle = colours.grid;
    context.fillRect(GUTTER, row.top, width - GUTTER, row.height);
    context.save();
    context.beginPath();
    context.rect(GUTTER, row.top, width - GUTTER, row.height);
    context.clip();
    row.lanes.forEach((lane, i) => drawLane(context, row, lane, i, width));
    context.restore();
  }

  /** How strongly a span is drawn: 1, or faint where it is not on the chain or not searched for. */
  function weight(row, span) {
    if (state.critical && !row.critical[span]) return 0.16;
    return state.found && !state.found[row.ops[span]] ? 0.14 : 1;
  }

  function drawLane(context, row, lane, place, width) {
    const k = scale(width), height = row.height / row.lanes.length, top = row.top + place * height;
    const { starts, ends, spans } = lane;
    let i = firstAbove(ends, state.from);
    while (i < spans.length && starts[i] < state.to) {
      const span = spans[i], op = row.ops[span];
      const x = GUTTER + (starts[i] - state.from) * k, right = GUTTER + (ends[i] - state.from) * k;
      context.fillStyle = row.kind !== "device" ? colours.carry : state.by === "device" ? colours.devices[data.devices.indexOf(row.label)] : colourOf[ops.templates[op]];
      if (right - x >= 1.5) {
        context.globalAlpha = weight(row, span);
        const hovered = state.hover && state.hover.row === row && state.hover.span === span;
        const left = Math.max(x, GUTTER - 4), wide = Math.min(right, width + 4) - left;
        context.fillRect(left, top, Math.max(wide - (right - x > 4 ? 1 : 0.3), 0.8), height - (row.lanes.length > 1 ? 1 : 0));
        if (hovered) outline(context, left, top, wide, height);
        context.globalAlpha = 1;
        if (wide > 46 && height > 14 && weight(row, span) === 1) label(context, ops.name(op), context.fillStyle, left, top, wide, height);
        i++;
        continue;
      }
      // Narrower than that: one bar for all that begin within this pixel.
      const pixel = Math.floor(x), until = state.from + (pixel + 1 - GUTTER) / k;
      const begun = Math.max(firstAbove(starts, until, i), i + 1);
      let next = i + 1;  // one that begins here but is wide is drawn by itself
      while (next < begun && (ends[next] - starts[next]) * k < 1.5) next++;
      const share = clamp((busyBefore(lane, until) - busyBefore(lane, until - 1 / k)) * k, row.kind === "device" ? 0.15 : 0.4, 1);
      let strength = weight(row, span);
      for (let j = i; j < next && strength < 1 && j < i + 64; j++) strength = Math.max(strength, weight(row, spans[j]));
      context.globalAlpha = strength;
      context.fillRect(pixel, top + height * (1 - share), 1, height * share);
      context.globalAlpha = 1;
      i = next;
    }
  }

  /** Nanoseconds before `t` in which something runs. */
  function busyBefore({ starts, ends, filled }, t) {
    const begun = firstAbove(starts, t);
    return begun ? filled[begun] - Math.max(ends[begun - 1] - t, 0) : 0;
  }

  function outline(context, x, y, width, height) {
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, Math.max(width - 2, 1), height - 2);
  }

  function label(context, text, colour, x, y, width, height) {
    context.save();
    context.beginPath();
    context.rect(x, y, width - 3, height);
    context.clip();
    context.fillStyle = inkOn(colour);
    const fits = context.measureText(text).width <= width - 8;
    const short = fits ? text : text.slice(text.lastIndexOf("/") + 1);
    context.fillText(short, Math.max(x, GUTTER) + 5, y + height / 2 + 0.5);
    context.restore();
  }

  function zoom(factor, x) {
    const width = canvas.clientWidth;
    const at = state.from + (clamp(x, GUTTER, width) - GUTTER) / scale(width);
    const length = clamp((state.to - state.from) / factor, 20, whole);
    const share = (at - state.from) / (state.to - state.from);
    state.from = clamp(at - share * length, 0, whole - length);
    state.to = state.from + length;
    redraw();
  }

  function move(dx) {
    const length = state.to - state.from;
    state.from = clamp(state.from - dx / scale(canvas.clientWidth), 0, whole - length);
    state.to = state.from + length;
    redraw();
  }

  function reset() {
    state.from = 0;
    state.to = whole;
    redraw();
  }

  /** The span at a point, within two pixels. */
  function spanAt(x, y) {
    if (x < GUTTER) return null;
    for (const timeline of timelines) {
      for (const row of timeline.rows) {
        if (y < row.top || y >= row.top + row.height) continue;
        const lane = row.lanes[Math.floor(((y - row.top) / row.height) * row.lanes.length)];
        if (!lane) return null;
        const k = scale(canvas.clientWidth), t = state.from + (x - GUTTER) / k;
        const i = firstAbove(lane.ends, t - 2 / k);
        return i < lane.starts.length && lane.starts[i] <= t + 2 / k ? { row, span: lane.spans[i], timeline } : null;
      }
    }
    return null;
  }

  function describe({ row, span, timeline }) {
    const op = row.ops[span], start = row.starts[span], end = row.ends[span];
    const when = `${seconds(end - start)}, from ${seconds(start)} to ${seconds(end)}`;
    const chain = row.critical[span] ? ["on the critical chain"] : [];
    if (row.kind === "channel") {
      const size = row.bytes[span];
      return [`${ops.name(op)} → ${data.devices[row.to[span]]}`, `transfer on ${row.label}, ${size ? bytes(size) : "nothing but order"}`, when, ...chain];
    }
    const where = ops.of(op).module ? ` in ${ops.of(op).module}` : "";
    return [ops.name(op), `${ops.of(op).kind}${where}`, `${data.phases[ops.of(op).phase]} on ${row.label}, ${timeline.name}`, when, ...chain];
  }

  function hover(event, x, y) {
    const found = event && spanAt(x, y);
    const changed = (found && found.span) !== (state.hover && state.hover.span) || (found && found.row) !== (state.hover && state.hover.row);
    state.hover = found;
    if (found) showTip(event, describe(found)); else hideTip();
    if (changed) redraw();
  }

  function find(text) {
    state.found = null;
    if (text) {
      state.found = new Uint8Array(ops.templates.length);
      const wanted = text.toLowerCase();
      for (let op = 0; op < state.found.length; op++) state.found[op] = ops.name(op).toLowerCase().includes(wanted) ? 1 : 0;
    }
    redraw();
  }

  navigate(canvas, { zoom, move, hover, reset });
  element("reset").addEventListener("click", reset);
  element("colour").addEventListener("change", (event) => { state.by = event.target.value; paint(); redraw(); });
  element("critical").addEventListener("change", (event) => { state.critical = event.target.checked; redraw(); });
  element("find").addEventListener("input", (event) => find(event.target.value.trim()));
  paint();
  draw();
  return () => { paint(); redraw(); };
}

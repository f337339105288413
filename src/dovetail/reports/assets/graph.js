// The graph: nodes in columns and lanes, placed by pictures.py, coloured by device.

const LANE_GUTTER = 118;

function unpackView(view) {
  const count = view.labels.length;
  const edges = [], touching = Array.from({ length: count }, () => []);
  for (let i = 0; i < view.edges.length; i += 3) {
    const edge = { from: view.edges[i], to: view.edges[i + 1], bytes: view.edges[i + 2] };
    edge.crosses = view.devices[edge.from] !== view.devices[edge.to];
    edges.push(edge);
    touching[edge.from].push(edge);
    touching[edge.to].push(edge);
  }
  edges.sort((a, b) => a.crosses - b.crosses);
  const laneOf = new Map();
  view.lanes.forEach(([, , top, rows], i) => { for (let r = top; r < top + rows; r++) laneOf.set(r, i); });
  // A little air between lanes.
  const y = view.rows.map((row) => row + 0.6 * laneOf.get(row) + 0.5);
  const width = 1 + Math.max(0, ...view.columns);
  const height = view.lanes.reduce((sum, lane) => sum + lane[3] + 0.6, 0.4);
  return { ...view, count, edges, touching, y, width, height };
}

function graphPicture(data) {
  const canvas = element("graph");
  const tree = foldTree(data.modules);
  const folded = () => unpackView(foldedView(data, tree, data.modules));
  const views = [folded(), ...data.views.map(unpackView)];
  const state = { view: views[0], x: 0, y: 0, kx: 1, ky: 1, hover: NONE };
  let colours;
  const redraw = onceAFrame(draw);
  const deviceColour = (device) => colours.devices[device];
  const showTable = foldTable(tree, refold);

  function paint() {
    colours = theme(data.devices.length);
    legend(element("devices"), data.devices.map((name, i) => [name, deviceColour(i)]));
  }

  function fit() {
    const { view } = state;
    canvas.style.height = `${clamp(30 * view.height + 24, 360, 780)}px`;
    state.kx = Math.min((canvas.clientWidth - LANE_GUTTER - 20) / view.width, 230);
    state.ky = Math.min((canvas.clientHeight - 24) / view.height, 46);
    state.x = LANE_GUTTER;
    state.y = Math.max(12, (canvas.clientHeight - view.height * state.ky) / 2);
    redraw();
  }

  /** Draws the modules again after a fold was opened or closed; the view stays where it is. */
  function refold() {
    views[0] = folded();
    showTable();
    nameViews();
    if (choice.value !== "0") return;
    state.view = views[0];
    state.hover = NONE;
    hideTip();
    fit();
  }

  const across = (node) => state.x + (state.view.columns[node] + 0.5) * state.kx;
  const down = (node) => state.y + (state.view.y[node] + 0.1) * state.ky;
  const half = () => [clamp(state.kx * 0.4, 1.2, 96), clamp(state.ky * 0.36, 1.2, 15)];

  function draw() {
    const [context, width, height] = prepare(canvas);
    const { view } = state;
    const [w, h] = half();
    drawLanes(context, width);
    for (const edge of view.edges) {
      const alpha = view.edges.length > 2500 ? 0.25 : 0.5;
      drawEdge(context, edge, w, edge.crosses ? deviceColour(view.devices[edge.from]) : colours.soft, edge.crosses ? 0.75 : alpha * 0.7, edge.crosses ? 1.5 : 1);
    }
    if (state.hover !== NONE) {
      for (const edge of view.touching[state.hover]) drawEdge(context, edge, w, colours.ink, 1, 2);
    }
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (let node = 0; node < view.count; node++) {
      const x = across(node), y = down(node);
      if (x < -w || x > width + w || y < -h || y > height + h) continue;
      drawNode(context, node, x, y, w, h);
    }
    drawLaneNames(context, height);
  }

  function drawNode(context, node, x, y, w, h) {
    const colour = deviceColour(state.view.devices[node]);
    context.fillStyle = colour;
    context.beginPath();
    context.roundRect(x - w, y - h, 2 * w, 2 * h, Math.min(5, h / 2));
    context.fill();
    if (node === state.hover) {
      context.strokeStyle = colours.ink;
      context.lineWidth = 2;
      context.stroke();
    }
    if (w < 26 || h < 7) return;
    context.save();
    context.clip();
    context.fillStyle = inkOn(colour);
    context.fillText(shortened(context, state.view.labels[node], 2 * w - 10), x, y + 0.5);
    context.restore();
  }

  /** The end of a name tells more than its start: "…Mixed_5b.branch1". */
  function shortened(context, text, room) {
    if (context.measureText(text).width <= room) return text;
    for (let at = text.indexOf("."); at >= 0; at = text.indexOf(".", at + 1)) {
      const end = `…${text.slice(at + 1)}`;
      if (context.measureText(end).width <= room) return end;
    }
    let tail = text.slice(-Math.ceil(room / 5.5));
    while (tail.length > 1 && context.measureText(`…${tail}`).width > room) tail = tail.slice(1);
    return `…${tail.replace(/^[./_]+/, "")}`;
  }

  function drawEdge(context, edge, w, colour, alpha, thickness) {
    const { view } = state;
    const forwards = view.columns[edge.to] > view.columns[edge.from];
    const same = view.columns[edge.to] === view.columns[edge.from];
    const x1 = across(edge.from) + (same ? 0 : forwards ? w : -w), x2 = across(edge.to) + (same ? 0 : forwards ? -w : w);
    const y1 = down(edge.from), y2 = down(edge.to);
    if (Math.max(x1, x2) < 0 || Math.min(x1, x2) > canvas.clientWidth) return;
    context.globalAlpha = alpha;
    context.strokeStyle = colour;
    context.lineWidth = thickness;
    context.beginPath();
    context.moveTo(x1, y1);
    const bend = same ? w * 1.15 : (x2 - x1) / 2;
    if (same) context.bezierCurveTo(x1 + bend, y1, x2 + bend, y2, x2, y2);
    else context.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    context.stroke();
    context.globalAlpha = 1;
  }

  const laneBox = (lane, i) => [state.y + (lane[2] + 0.6 * i - 0.1) * state.ky + 2, (lane[3] + 0.4) * state.ky];

  function drawLanes(context, width) {
    state.view.lanes.forEach((lane, i) => {
      const [top, height] = laneBox(lane, i);
      context.globalAlpha = 0.08;
      context.fillStyle = deviceColour(lane[1]);
      context.fillRect(0, top, width, height);
      context.globalAlpha = 1;
    });
  }

  function drawLaneNames(context, height) {
    context.textAlign = "left";
    let last = -20;
    state.view.lanes.forEach((lane, i) => {
      const [top, tall] = laneBox(lane, i);
      const y = clamp(top + tall / 2, Math.min(top + 10, height), Math.max(top + tall - 10, 0));
      if (y < -10 || y > height + 10 || y - last < 13) return;
      last = y;
      const wide = Math.min(context.measureText(lane[0]).width, LANE_GUTTER - 16) + 14;
      context.globalAlpha = 0.9;
      context.fillStyle = colours.paper;
      context.fillRect(0, y - 9, wide, 18);
      context.globalAlpha = 1;
      context.fillStyle = deviceColour(lane[1]);
      context.fillRect(0, y - 9, 3, 18);
      context.fillStyle = colours.ink;
      context.fillText(lane[0], 9, y, LANE_GUTTER - 16);
    });
  }

  function zoom(factor, x, y) {
    const next = clamp(state.kx * factor, 0.5, 400) / state.kx;
    const nextY = clamp(state.ky * factor, 1, 60) / state.ky;
    state.x = x - (x - state.x) * next;
    state.y = y - (y - state.y) * nextY;
    state.kx *= next;
    state.ky *= nextY;
    redraw();
  }

  function move(dx, dy) {
    state.x += dx;
    state.y += dy;
    redraw();
  }

  function nodeAt(x, y) {
    const [w, h] = half();
    for (let node = 0; node < state.view.count; node++) {
      if (Math.abs(x - across(node)) <= Math.max(w, 3) && Math.abs(y - down(node)) <= Math.max(h, 3)) return node;
    }
    return NONE;
  }

  function describe(node) {
    const { view } = state;
    const received = view.touching[node].filter((edge) => edge.to === node && edge.crosses);
    const sum = received.reduce((total, edge) => total + edge.bytes, 0);
    const lines = [
      view.labels[node], view.details[node],
      `${data.phases[view.phases[node]]} on ${data.devices[view.devices[node]]}`,
      `${seconds(view.seconds[node])} of computing, ${amount(view.flops[node])}FLOP`,
    ];
    if (received.length) lines.push(`reads ${bytes(sum)} from other devices`);
    if (view.folds) {
      const fold = view.folds[node], many = tree.children[fold].length;
      if (many && !tree.open.has(fold)) lines.push(`Click: unfold ${many}`);
      else if (data.modules.parents[fold] > 0) lines.push(`Click: fold ${data.modules.paths[tree.open.has(fold) ? fold : data.modules.parents[fold]]}`);
    }
    return lines.filter(Boolean);
  }

  function hover(event, x, y) {
    const node = event ? nodeAt(x, y) : NONE;
    if (node === NONE) hideTip(); else showTip(event, describe(node));
    if (node !== state.hover) { state.hover = node; redraw(); }
  }

  /** A click unfolds a closed fold; on what cannot be unfolded it folds what that is within. */
  function press(x, y) {
    const node = nodeAt(x, y);
    if (node === NONE || !state.view.folds) return false;
    const fold = state.view.folds[node];
    const whole = tree.children[fold].length ? fold : data.modules.parents[fold];
    if (whole > 0 && tree.toggle(whole)) refold();
    return true;
  }

  const choice = element("view");
  choice.append(...views.map((_, i) => {
    const option = document.createElement("option");
    option.value = i;
    return option;
  }));
  function nameViews() {
    views.forEach((view, i) => { choice.options[i].textContent = `${view.name} (${view.count.toLocaleString("en")})`; });
  }
  nameViews();
  choice.addEventListener("change", () => { state.view = views[choice.value]; state.hover = NONE; fit(); });
  element("fit").addEventListener("click", fit);
  navigate(canvas, { zoom, move, hover, press, reset: fit });
  showTable();
  paint();
  fit();
  return () => { paint(); redraw(); };
}

// The graph by module, folded: from what pictures.py packed to a view as it makes them.
//
// What is within a closed fold is one node per phase and device. Nodes stand in columns by depth and
// in lanes by device and phase; backward and update nodes stand below their forward node.

const FORWARD = 1;

function foldTree({ labels, parents, opened, leaves }) {
  const children = labels.map(() => []);
  parents.forEach((parent, fold) => { if (parent >= 0) children[parent].push(fold); });
  const open = new Set(opened);
  const drawnIn = () => {
    const outer = parents.map(() => NONE);  // the outermost closed fold around each
    for (let fold = 0; fold < parents.length; fold++) {
      const above = parents[fold] >= 0 ? outer[parents[fold]] : NONE;
      outer[fold] = above !== NONE ? above : open.has(fold) ? NONE : fold;
    }
    return leaves.folds.map((fold) => (outer[fold] === NONE ? fold : outer[fold]));
  };
  const visible = (fold) => parents[fold] < 0 || (open.has(parents[fold]) && visible(parents[fold]));
  const toggle = (fold) => {
    if (!children[fold].length) return false;
    if (!open.delete(fold)) open.add(fold);
    return true;
  };
  return { open, children, drawnIn, visible, toggle };
}

function foldedView(data, tree, modules) {
  const { leaves } = modules, of = tree.drawnIn(), keys = new Map();
  // Nodes are numbered by the middle of their ops: what begins with a view of a weight is not first.
  const places = new Map(), weights = new Map();
  const keyOf = (leaf) => `${of[leaf]} ${leaves.phases[leaf]} ${leaves.devices[leaf]}`;
  of.forEach((_, leaf) => {
    const key = keyOf(leaf), ops = leaves.ops[leaf];
    places.set(key, (places.get(key) || 0) + ops * leaves.places[leaf]);
    weights.set(key, (weights.get(key) || 0) + ops);
  });
  const inOrder = of.map((_, leaf) => leaf).sort((a, b) => places.get(keyOf(a)) / weights.get(keyOf(a)) - places.get(keyOf(b)) / weights.get(keyOf(b)) || a - b);
  const view = { name: "modules", labels: [], details: [], devices: [], phases: [], ops: [], flops: [], seconds: [], folds: [] };
  const nodeOf = new Int32Array(of.length);
  for (const leaf of inOrder) {
    const fold = of[leaf], phase = leaves.phases[leaf], device = leaves.devices[leaf], key = keyOf(leaf);
    if (!keys.has(key)) {
      keys.set(key, view.labels.length);
      const itself = tree.open.has(fold) && tree.children[fold].length;
      view.labels.push(modules.paths[fold]);
      view.details.push(itself ? "what it runs itself, between the modules within" : "");
      view.devices.push(device);
      view.phases.push(phase);
      view.folds.push(fold);
      for (const sum of [view.ops, view.flops, view.seconds]) sum.push(0);
    }
    const node = keys.get(key);
    view.ops[node] += leaves.ops[leaf];
    view.flops[node] += leaves.flops[leaf];
    view.seconds[node] += leaves.seconds[leaf];
    nodeOf[leaf] = node;
  }
  view.details = view.details.map((text, node) => [`${view.ops[node].toLocaleString("en")} ops`, text].filter(Boolean).join(": "));
  const carried = new Map();
  for (let i = 0; i < modules.edges.length; i += 3) {
    const from = nodeOf[modules.edges[i]], to = nodeOf[modules.edges[i + 1]];
    if (from !== to) carried.set(`${from} ${to}`, [from, to, modules.edges[i + 2] + (carried.get(`${from} ${to}`) || [0, 0, 0])[2]]);
  }
  const edges = [...carried.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  view.edges = edges.flat();
  view.columns = foldColumns(view, edges);
  Object.assign(view, foldRows(data, view, edges));
  return view;
}

/** Forward nodes one column right of the last that they read; others with their forward node. */
function foldColumns(view, edges) {
  const columns = view.labels.map(() => 0), forward = view.phases.map((phase) => phase === FORWARD);
  const reads = new Set(), firstReader = new Map();
  const ahead = edges.filter(([a, b]) => a < b && forward[a] && forward[b]);  // by a: it is settled
  for (const [a, b] of ahead) { columns[b] = Math.max(columns[b], columns[a] + 1); reads.add(b); }
  for (const [a, b] of ahead) firstReader.set(a, Math.min(firstReader.get(a) ?? Infinity, columns[b]));
  // What waits for nothing stands beside what reads it.
  for (const [node, reader] of firstReader) if (!reads.has(node)) columns[node] = reader - 1;
  const byFold = new Map();
  view.folds.forEach((fold, node) => {
    if (!forward[node]) return;
    byFold.set(`${fold} ${view.devices[node]}`, node);
    if (!byFold.has(fold)) byFold.set(fold, node);
  });
  const settled = [...forward];
  view.folds.forEach((fold, node) => {
    if (forward[node] || !byFold.has(fold)) return;
    columns[node] = columns[byFold.get(`${fold} ${view.devices[node]}`) ?? byFold.get(fold)];
    settled[node] = true;
  });
  for (const [a, b] of edges) {  // a loss without a forward node, and the like
    for (const [node, other] of [[a, b], [b, a]]) {
      if (!settled[node] && settled[other]) { columns[node] = columns[other]; settled[node] = true; }
    }
  }
  return columns;
}

/** Nodes of one column and lane below each other, in the order of what they read. */
function foldRows(data, view, edges) {
  const reads = view.labels.map(() => []), inside = view.labels.map(() => 0), cells = new Map();
  for (const [a, b] of edges) reads[b].push(a);
  const order = view.labels.map((_, node) => node).sort((a, b) => view.columns[a] - view.columns[b] || a - b);
  for (const node of order) {
    const key = `${view.columns[node]} ${view.devices[node]} ${view.phases[node]}`;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(node);
  }
  for (const cell of cells.values()) {
    const weight = new Map(cell.map((node) => [node, reads[node].reduce((sum, a) => sum + inside[a], 0) / (reads[node].length || 1)]));
    cell.sort((a, b) => weight.get(a) - weight.get(b) || a - b).forEach((node, row) => { inside[node] = row; });
  }
  const lanes = [], rows = view.labels.map(() => 0);
  let top = 0;
  data.devices.forEach((name, device) => {
    for (let phase = FORWARD; phase < data.phases.length; phase++) {
      const within = order.filter((node) => view.devices[node] === device && view.phases[node] === phase);
      if (!within.length) continue;
      const height = 1 + Math.max(...within.map((node) => inside[node]));
      for (const node of within) rows[node] = top + inside[node];
      lanes.push([`${name} ${data.phases[phase]}`, device, top, height]);
      top += height;
    }
  });
  return { rows, lanes };
}

/** The table of modules by device: its buttons fold and unfold, and its rows follow the graph's. */
function foldTable(tree, folded) {
  const table = element("layers");
  if (!table) return () => {};
  const rows = [...table.querySelectorAll("tr[data-fold]")];
  const show = () => {
    for (const row of rows) {
      const fold = Number(row.dataset.fold), button = row.querySelector("button");
      row.hidden = !tree.visible(fold);
      if (button) button.setAttribute("aria-expanded", String(tree.open.has(fold)));
    }
  };
  table.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && tree.toggle(Number(button.closest("tr").dataset.fold))) folded();
  });
  return show;
}

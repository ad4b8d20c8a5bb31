// The block, row and column of every rank, before anything has a size on the screen.
//
// { blocks: [{ label, corner, heads, rows: [{ label, cells }] }], drawn, wrap }: cells and heads hold null where
// ranks are left out. A block without rows represents omitted blocks. wrap: rows may wrap anywhere.

// A mesh with more cells is folded, because more cells are neither readable nor fast to draw.
const MOST = 320;
const UNFOLDED = 2048;

// The drawn coords of 0 to size - 1: the first, the last, and coords around `keep`; null: a gap.
function shown(size, limit, keep) {
  if (size <= limit) return range(size);
  const near = keep === undefined ? [] : [keep - 1, keep, keep + 1];
  const tail = limit >= 6 ? [size - 2, size - 1] : [size - 1];
  const head = range(Math.max(limit >= 4 ? 2 : 1, limit - tail.length - near.length));
  const wanted = [...new Set([...head, ...near, ...tail])].filter((c) => c >= 0 && c < size).sort((a, b) => a - b);
  return wanted.flatMap((coord, i) => (i && coord !== wanted[i - 1] + 1 ? [null, coord] : [coord]));
}

// The number of drawn coords of each axis. Columns and rows, the first two, are shortened after blocks.
function limits(sizes, world) {
  const found = [...sizes];
  if (world <= UNFOLDED) return found;
  const weight = (limit, axis) => (limit <= 3 ? 0 : axis < 2 ? limit : 2 * limit);
  while (found.reduce((a, b) => a * b, 1) > MOST) {
    const weights = found.map(weight);
    const most = weights.indexOf(Math.max(...weights));
    if (!weights[most]) break;
    found[most] = Math.max(3, Math.ceil(found[most] * 0.8) - 1);
  }
  return found;
}

// Every group along the family is a row; the innermost of the other dims counts rows, the rest blocks.
function byGroup(mesh, family, keep) {
  const rest = mesh.others(family).filter(({ size }) => size > 1);
  const inner = rest.at(-1), outer = rest.slice(0, -1);
  const axes = [[sizeOf(family.digits), family.digits], [inner?.size ?? 1, inner ? [[inner.size, inner.stride]] : []]];
  outer.forEach(({ size, stride }) => axes.push([size, [[size, stride]]]));
  const most = limits(axes.map(([size]) => size), mesh.world);
  const [columns, rows, ...wholes] = axes.map(([size, digits], i) =>
    shown(size, most[i], keep === undefined ? undefined : coordOf(keep, digits)));

  const blocks = [];
  const visit = (depth, base, names) => {
    if (depth === outer.length) {
      blocks.push({
        label: names.join(" "),
        corner: `${family.name} →`,
        heads: columns,
        rows: rows.map((row) => ({
          label: row === null ? "⋮" : inner ? `${inner.name} ${row}` : "",
          cells: columns.map((column) => (row === null || column === null
            ? null : base + (inner ? row * inner.stride : 0) + offsetOf(column, family.digits))),
        })),
      });
      return;
    }
    for (const coord of wholes[depth]) {
      const { name, size, stride } = outer[depth];
      if (coord === null) blocks.push({ label: [...names, `${name} …`].join(" "), rows: [], of: size });
      else visit(depth + 1, base + coord * stride, [...names, `${name} ${coord}`]);
    }
  };
  visit(0, 0, []);
  return { blocks, wrap: false };
}

// Ranks side by side that share a node, in the order of their numbers.
function byNode(mesh, keep) {
  const ranks = mesh.order ? [...mesh.order].sort((a, b) => a - b) : null;
  const members = new Map();
  for (const rank of ranks ?? []) {
    if (!members.has(mesh.node(rank))) members.set(mesh.node(rank), []);
    members.get(mesh.node(rank)).push(rank);
  }
  const nodes = ranks ? [...members.keys()] : range(Math.ceil(mesh.world / mesh.perNode));
  const of = (node) => members.get(node) ?? range(Math.min(mesh.perNode, mesh.world - node * mesh.perNode)).map((i) => node * mesh.perNode + i);
  const across = range(mesh.perNode + 1).find((d) => d && mesh.perNode % d === 0 && d * d >= mesh.perNode);
  const [mostNodes, mostRanks] = limits([nodes.length, mesh.perNode], mesh.world);
  const at = keep === undefined ? undefined : nodes.indexOf(mesh.node(mesh.rank(keep)));
  const blocks = shown(nodes.length, mostNodes, at).map((index) => {
    if (index === null) return { label: "node …", rows: [], of: nodes.length };
    const here = of(nodes[index]);
    const inside = keep === undefined ? -1 : here.indexOf(mesh.rank(keep));
    const cells = shown(here.length, mostRanks, inside < 0 ? undefined : inside)
      .map((i) => (i === null ? null : mesh.position(here[i])));
    const rows = range(Math.ceil(cells.length / across)).map((i) => ({ label: "", cells: cells.slice(i * across, (i + 1) * across) }));
    return { label: `node ${nodes[index]}`, rows };
  });
  return { blocks, wrap: false };
}

// One long line of ranks.
function byRank(mesh, keep) {
  const ranks = mesh.order ? [...mesh.order].sort((a, b) => a - b) : null;
  const [most] = limits([mesh.world], mesh.world);
  const at = keep === undefined ? undefined : ranks ? ranks.indexOf(mesh.rank(keep)) : keep;
  const cells = shown(mesh.world, most, at).map((i) => (i === null ? null : ranks ? mesh.position(ranks[i]) : i));
  return { blocks: [{ label: "", rows: [{ label: "", cells }] }], wrap: true };
}

function arranged(mesh, family, by, keep) {
  const found = by === "node" ? byNode(mesh, keep) : by === "rank" ? byRank(mesh, keep) : byGroup(mesh, family, keep);
  found.drawn = 0;
  for (const block of found.blocks) for (const row of block.rows) found.drawn += row.cells.filter((cell) => cell !== null).length;
  return found;
}

// Draws the mesh: cells move when it is turned, lines mark node borders, and a rank's groups light up.

const SIDES = [64, 54, 46, 40, 34, 30, 26, 22, 18, 15];
// A folded mesh has few ranks with long numbers.
const FOLDED_SIDE = 34;
const GAP = 4;
const TALL = 680;
// Numbers below this many pixels are not readable.
const READABLE = 6.5;

class Picture {
  // on: { rank(position or undefined), hold(position) }: called for the rank under the pointer, and for a clicked rank.
  constructor(host, mesh, on) {
    this.host = host;
    this.mesh = mesh;
    this.cells = new Map();
    this.plates = draw("g", { class: "plates" });
    this.body = draw("g", {});
    this.borders = draw("path", { class: "borders" });
    this.labels = draw("g", { class: "labels" });
    this.svg = draw("svg", { role: "group" }, this.plates, this.body, this.borders, this.labels);
    this.lens = new Lens(this.svg);
    this.legible = false;
    host.append(this.svg);
    const at = (event) => {
      const cell = event.target.closest?.(".cell");
      return cell ? Number(cell.dataset.position) : undefined;
    };
    this.svg.addEventListener("pointerover", (event) => event.pointerType !== "touch" && on.rank(at(event)));
    this.svg.addEventListener("pointerleave", () => on.rank(undefined));
    // Not on the svg: Chromium makes an svg with these listeners a stop of the Tab key.
    host.addEventListener("focusin", (event) => {
      this.makeTabStop(at(event));
      if (event.target.matches(":focus-visible")) on.rank(at(event));
    });
    host.addEventListener("focusout", () => on.rank(undefined));
    this.svg.addEventListener("click", (event) => at(event) !== undefined && on.hold(at(event)));
    this.svg.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const here = at(event);
      if (here === undefined) return;
      if (steps[event.key]) this.step(here, ...steps[event.key]);
      else if (event.key === "Enter" || event.key === " ") on.hold(here);
      else return;
      event.preventDefault();
    });
  }

  // arrangement: as from `arranged`. family: its groups have the colors.
  show(arrangement, family) {
    this.arrangement = arrangement;
    this.family = family;
    this.fit();
  }

  // Whether cells must be large enough for their numbers, at any height of the picture.
  enlarge(legible) {
    this.legible = legible;
    this.fit();
  }

  // The largest cells for which the picture is not too tall, at the available width.
  fit() {
    const width = this.host.clientWidth;
    if (!width || !this.arrangement) return;
    this.width = width;
    let plan;
    const sides = SIDES.filter((side) => side >= FOLDED_SIDE || this.arrangement.drawn === this.mesh.world);
    for (const side of this.legible ? sides.filter((side) => this.numberSize(side) >= READABLE) : sides) {
      plan = this.laid(side, width);
      if (plan.height <= TALL && plan.fits) break;
    }
    this.drawCells(plan);
  }

  // In pixels: four digits need 22 of a cell's side.
  numberSize(side) {
    return Math.min(16, side * 0.4, (side - 4) / (0.62 * String(this.mesh.largest).length));
  }

  // Whether cells of the current size show their numbers.
  get numbered() { return !this.plan || this.numberSize(this.plan.side) >= READABLE; }

  laid(side, width) {
    const { blocks, wrap } = this.arrangement;
    const pitch = side + (side < 22 ? GAP / 2 : GAP);
    const widest = Math.max(0, ...blocks.flatMap(({ rows, corner }) => [...rows.map(({ label }) => label.length), rows.length && corner ? corner.length : 0]));
    const left = widest ? Math.max(26, widest * 6.6 + 8) : 0;
    const plan = { side, pitch, left, cells: [], gaps: [], labels: [], plates: [], fits: true, height: 0, broken: false };
    let x = 0, y = 0, lineHeight = 0;
    for (const block of blocks) {
      const columns = Math.max(0, ...block.rows.map(({ cells }) => cells.length));
      const room = Math.max(1, Math.floor((width - left - 2 * GAP) / pitch));
      let per = Math.min(columns, room);
      if (columns > room && !wrap) {
        // Equal lines where that costs little.
        per = range(room).map((i) => room - i).find((d) => d * 2 >= room && columns % d === 0) ?? room;
        if (room < 8) plan.fits = false;
      }
      const lines = columns ? Math.ceil(columns / per) : 0;
      plan.broken ||= lines > 1;
      const heads = block.heads && lines === 1 && columns > 1 && pitch > 6.4 * String(block.heads.at(-1)).length;
      const top = (block.label ? 20 : 0) + (heads ? 17 : 0);
      const rowHeight = lines * pitch + (lines > 1 ? 8 : 0);
      const high = block.rows.length ? top + block.rows.length * rowHeight + GAP : top + pitch;
      const wide = block.rows.length ? left + per * pitch + 2 * GAP : Math.max(64, block.label.length * 7);
      if (x && x + wide > width) { x = 0; y += lineHeight + 18; lineHeight = 0; }
      if (wide > width + 1) plan.fits = false;
      this.place(plan, block, { x, y, top, per, rowHeight, wide, heads });
      x += wide + 22;
      lineHeight = Math.max(lineHeight, high);
      plan.height = Math.max(plan.height, y + high);
    }
    return plan;
  }

  place(plan, block, { x, y, top, per, rowHeight, wide, heads }) {
    const { pitch, left } = plan;
    if (block.label) plan.labels.push({ x: x + (block.rows.length ? left + GAP : 0), y: y + 13, text: block.label, kind: "strong" });
    if (!block.rows.length) { plan.labels.push({ x: x + 20, y: y + 40, text: "⋯", kind: "label" }); return; }
    plan.plates.push({ x: x + left + GAP / 2, y: y + top - GAP / 2, width: per * pitch + GAP / 2, height: block.rows.length * rowHeight + GAP });
    if (heads) {
      if (block.corner) plan.labels.push({ x: x + left - 4, y: y + top - 7, text: block.corner, kind: "label end" });
      block.heads.forEach((coord, i) => plan.labels.push({
        x: x + left + GAP + i * pitch + plan.side / 2, y: y + top - 7, text: coord === null ? "⋯" : String(coord), kind: "label middle",
      }));
    }
    const grid = new Map();
    block.rows.forEach((row, r) => {
      const rowTop = y + top + r * rowHeight + GAP / 2;
      if (row.label) plan.labels.push({ x: x + left - 4, y: rowTop + plan.side / 2 + 4, text: row.label, kind: "label end" });
      row.cells.forEach((position, i) => {
        const column = i % per, line = Math.floor(i / per);
        const at = { x: x + left + GAP + column * pitch, y: rowTop + line * pitch, position };
        (position === null ? plan.gaps : plan.cells).push(at);
        // Wrapped rows are not placed next to the next block.
        grid.set(`${column} ${r * Math.ceil(row.cells.length / per) + line}`, at);
      });
    });
    plan.grids = [...(plan.grids ?? []), grid];
  }

  drawCells(plan) {
    const { mesh, family, svg } = this;
    const { side } = plan;
    const groups = mesh.world / family.size;
    this.plan = plan;
    svg.setAttribute("height", Math.ceil(plan.height));
    svg.setAttribute("aria-label", `${count(mesh.world, "rank")}, colored by their groups along ${family.name}`);
    this.plates.replaceChildren(...plan.plates.map((plate) => draw("rect", { class: "plate", rx: 8, ...plate })));
    this.labels.replaceChildren(
      ...plan.labels.map(({ x, y, text, kind }) => draw("text", {
        class: kind, x, y, text, "text-anchor": kind.endsWith("end") ? "end" : kind.endsWith("middle") ? "middle" : null,
      })),
      ...plan.gaps.map(({ x, y }) => draw("text", { class: "label", x: x + side / 2, y: y + side / 2 + 3, text: "·", "text-anchor": "middle" })));
    const numberSize = this.numberSize(side);
    const left = new Map(this.cells);
    for (const { x, y, position } of plan.cells) {
      const cell = left.get(position) ?? this.made(position);
      left.delete(position);
      const hue = groupHue(mesh.groupIndex(position, family), groups);
      cell.style.transform = `translate(${x}px, ${y}px)`;
      cell.style.setProperty("--hue", hue.toFixed(1));
      const [body, number, sub] = cell.children;
      fill(body, { width: side, height: side, rx: Math.min(8, side / 5) }, []);
      const node = side >= 46 && mesh.perNode !== null;
      fill(number, { x: side / 2, y: side * (node ? 0.4 : 0.51) }, []);
      number.style.fontSize = `${numberSize}px`;
      number.style.visibility = numberSize < READABLE ? "hidden" : "";
      sub.textContent = node ? `node ${mesh.node(mesh.rank(position))}` : "";
      fill(sub, { x: side / 2, y: side * 0.73 }, []);
      sub.style.fontSize = "10px";
    }
    for (const [position, cell] of left) { cell.remove(); this.cells.delete(position); }
    this.borders.setAttribute("d", mesh.perNode === null ? "" : (plan.grids ?? []).map((grid) => this.between(grid, plan)).join(""));
    if (!this.cells.has(this.stop)) this.makeTabStop(plan.cells[0]?.position);
  }

  made(position) {
    const rank = this.mesh.rank(position);
    const node = this.mesh.node(rank);
    const spoken = `rank ${rank}, ${coordsText(this.mesh.coords(position, ""))}${node === null ? "" : `, node ${node}`}`;
    const cell = draw("g", { class: "cell", role: "button", tabindex: -1, "data-rank": rank, "data-position": position, "aria-label": spoken },
      draw("rect", {}), draw("text", { class: "num", text: rank }), draw("text", { class: "sub" }));
    this.cells.set(position, cell);
    this.body.append(cell);
    return cell;
  }

  // Lines between adjacent cells whose ranks do not share a node, and around the block.
  between(grid, { side, pitch }) {
    const node = (at) => (at && at.position !== null ? this.mesh.node(this.mesh.rank(at.position)) : undefined);
    let path = "";
    const reach = (pitch - side) / 2;
    for (const [key, at] of grid) {
      const [column, row] = key.split(" ").map(Number);
      const here = node(at);
      const right = grid.get(`${column + 1} ${row}`), below = grid.get(`${column} ${row + 1}`);
      if (here !== node(right)) path += `M${at.x + side + reach} ${at.y - reach}v${pitch}`;
      if (here !== node(below)) path += `M${at.x - reach} ${at.y + side + reach}h${pitch}`;
      if (!column) path += `M${at.x - reach} ${at.y - reach}v${pitch}`;
      if (!row || (at.y - (grid.get(`${column} ${row - 1}`)?.y ?? at.y) > pitch + 1)) path += `M${at.x - reach} ${at.y - reach}h${pitch}`;
    }
    return path;
  }

  // Light up the groups of a rank: each cell in the color of the first family that it shares with the rank.
  light(position, families) {
    this.svg.classList.toggle("lit", position !== undefined);
    const at = position === undefined || this.numbered ? undefined : this.plan.cells.find((cell) => cell.position === position);
    this.lens.show(at && `rank ${this.mesh.rank(position)}: ${coordsText(this.mesh.coords(position, this.family.home))}`, at, this.plan.side, this.width);
    for (const [other, cell] of this.cells) {
      const shared = position === undefined || other === position ? undefined
        : families.find((family) => family.size > 1 && this.mesh.sameGroup(other, position, family));
      cell.classList.toggle("self", other === position);
      cell.classList.toggle("mate", shared !== undefined);
      if (shared) cell.style.setProperty("--ring", shared.hue.toFixed(1));
      cell.toggleAttribute("data-shared", shared !== undefined);
      if (shared) cell.dataset.shared = shared.name;
    }
  }

  hold(position) {
    for (const [other, cell] of this.cells) cell.setAttribute("aria-pressed", String(other === position));
  }

  makeTabStop(position) {
    this.cells.get(this.stop)?.setAttribute("tabindex", "-1");
    this.stop = position;
    this.cells.get(position)?.setAttribute("tabindex", "0");
  }

  // To the nearest cell in a direction.
  step(position, dx, dy) {
    const here = this.plan.cells.find((cell) => cell.position === position);
    let best, least = Infinity;
    for (const there of this.plan.cells) {
      const ahead = (there.x - here.x) * dx + (there.y - here.y) * dy;
      const aside = Math.abs((there.x - here.x) * dy) + Math.abs((there.y - here.y) * dx);
      if (ahead > 1 && ahead + 4 * aside < least) { least = ahead + 4 * aside; best = there; }
    }
    if (best) this.focus(best.position);
  }

  focus(position) {
    this.makeTabStop(position);
    this.cells.get(position)?.focus({ focusVisible: true });
  }
}

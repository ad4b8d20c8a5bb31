// A curve over the steps, with any number of points.

const HIGH = 150, PAD = { left: 52, right: 10, top: 10, bottom: 22 };

// About `many` round numbers from low to high.
function ticks(low, high, many) {
  const rough = (high - low) / many || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return range(Math.max(0, Math.floor(high / step + 1e-9) - first + 1)).map((i) => Number(((first + i) * step).toPrecision(12)));
}

// One point for each pixel column: the mean of its values.
function thinned(xs, ys, columns) {
  if (xs.length <= columns) return xs.map((x, i) => [x, ys[i]]);
  const first = xs[0], scale = (columns - 1) / (xs.at(-1) - first || 1);
  const found = [];
  let column = -1, sum = 0, sumX = 0, many = 0;
  const end = () => many && found.push([sumX / many, sum / many]);
  for (let i = 0; i < xs.length; i++) {
    const own = Math.floor((xs[i] - first) * scale);
    if (own !== column) { end(); column = own; sum = sumX = many = 0; }
    sum += ys[i]; sumX += xs[i]; many += 1;
  }
  end();
  return found;
}

class Chart {
  // options: name, text(value), hue, zero: whether the axis begins at 0.
  constructor(host, options) {
    this.options = options;
    this.xs = []; this.ys = [];
    this.value = el("b", {});
    this.svg = draw("svg", { class: "chart", role: "img", "--ring": options.hue });
    this.figure = el("figure", { "data-chart": options.name }, el("figcaption", {}, el("span", { text: options.name }), this.value), this.svg);
    host.append(this.figure);
    this.cross = draw("g", {});
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.cross.replaceChildren(); this.say(this.ys.length - 1); });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  update(xs, ys) {
    this.xs = []; this.ys = [];
    xs.forEach((x, i) => { if (ys[i] !== null) { this.xs.push(x); this.ys.push(ys[i]); } });
    this.figure.dataset.points = this.xs.length;
    this.draw();
  }

  draw() {
    const { xs, ys, svg, options } = this;
    const width = svg.clientWidth;
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${HIGH}`);
    if (!xs.length) { svg.replaceChildren(); this.value.textContent = "–"; return; }
    const points = thinned(xs, ys, Math.max(2, width - PAD.left - PAD.right));
    let low = options.zero ? 0 : Infinity, high = -Infinity;
    for (const [, y] of points) { low = Math.min(low, y); high = Math.max(high, y); }
    if (!(high > low)) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
    const first = xs[0], last = Math.max(xs.at(-1), first + 1);
    this.x = (x) => PAD.left + ((x - first) / (last - first)) * (width - PAD.left - PAD.right);
    this.y = (y) => HIGH - PAD.bottom - ((y - low) / (high - low)) * (HIGH - PAD.top - PAD.bottom);
    const line = points.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    const bottom = HIGH - PAD.bottom;
    svg.replaceChildren(
      ...ticks(low, high, 4).flatMap((y) => [
        draw("path", { class: "grid", d: `M${PAD.left} ${this.y(y)}H${width - PAD.right}` }),
        draw("text", { x: PAD.left - 6, y: this.y(y) + 4, "text-anchor": "end", text: options.axis(y) })]),
      ...ticks(first, last, Math.max(3, width / 70)).filter(Number.isInteger).map((x) =>
        draw("text", { x: this.x(x), y: HIGH - 6, "text-anchor": "middle", text: x.toLocaleString("en") })),
      draw("path", { class: "under", d: `${line}L${this.x(points.at(-1)[0]).toFixed(1)} ${bottom}L${this.x(points[0][0]).toFixed(1)} ${bottom}Z` }),
      draw("path", { class: "curve", d: line }),
      ...(points.length === 1 ? [draw("circle", { class: "dot", r: 3, cx: this.x(points[0][0]), cy: this.y(points[0][1]) })] : []),
      this.cross);
    svg.setAttribute("aria-label", `${options.name}: ${options.text(ys[0])} at step ${xs[0]}, ${options.text(ys.at(-1))} at step ${xs.at(-1)}`);
    this.say(ys.length - 1);
  }

  say(index) { if (index >= 0) this.value.textContent = `${this.options.text(this.ys[index])} at step ${this.xs[index].toLocaleString("en")}`; }

  point(event) {
    if (!this.xs.length || !this.x) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    // Steps ascend: halve until the nearest is found.
    let low = 0, high = this.xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.x(this.xs[middle]) < at) low = middle + 1; else high = middle;
    }
    if (low && at - this.x(this.xs[low - 1]) < this.x(this.xs[low]) - at) low -= 1;
    const x = this.x(this.xs[low]);
    this.cross.replaceChildren(
      draw("path", { class: "grid cross", d: `M${x} ${PAD.top}V${HIGH - PAD.bottom}` }),
      draw("circle", { class: "dot", r: 3.5, cx: x, cy: this.y(this.ys[low]) }));
    this.say(low);
  }
}

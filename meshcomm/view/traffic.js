// The traffic along each dim: predicted for one step from the configuration, or measured by the run.

const TRAFFIC = {
  bytes: { of: (row) => row.sent_bytes, text: bytesText },
  time: { of: (row) => row.seconds, text: secondsText },
  measured: { of: (row) => row.nbytes, text: bytesText },
};

// Rows grouped by their dims, largest first.
function trafficGroups(rows, measure) {
  const found = new Map();
  for (const row of rows) {
    const name = row.along.join(" + ");
    if (!found.has(name)) found.set(name, { name, along: row.along, rows: [], total: 0 });
    found.get(name).rows.push(row);
    found.get(name).total += measure.of(row);
  }
  for (const group of found.values()) group.rows.sort((a, b) => measure.of(b) - measure.of(a));
  return [...found.values()].sort((a, b) => b.total - a.total);
}

function predictedLine(row) {
  const times = `${row.calls.toLocaleString("en")} × ${bytesText(row.size_bytes)}`;
  const took = row.seconds === null ? "" : `, ${secondsText(row.seconds)} on ${row.link}`;
  const received = row.received_bytes === null ? "" : `, ${bytesText(row.received_bytes)} received`;
  return `${row.operation}: ${row.what}; ${times} → ${bytesText(row.sent_bytes)} sent${received}${took}`;
}

function measuredLine(row) {
  const inside = row.seconds === null ? "time not known" : `${secondsText(row.seconds)} in ${row.calls === 1 ? "the call" : "the calls"}`;
  return `${row.call}${row.async_op ? ", asynchronous" : ""}: ${count(row.calls, "call")}, ${bytesText(row.nbytes)}, ${inside}`;
}

// traffic: as from predicted_traffic. turn(along): called when the user clicks a dim's name.
class Traffic {
  constructor(mesh, traffic, turn) {
    this.mesh = mesh;
    this.traffic = traffic;
    this.turn = turn;
    this.stats = null;
    this.chosen = "bytes";
    this.choices();
    this.show();
  }

  // stats: the rows of Mesh.stats over this many steps, or null.
  measured(stats, steps) {
    if (JSON.stringify(stats) === JSON.stringify(this.stats)) return;
    this.stats = stats;
    this.steps = steps;
    if (stats === null && this.chosen === "measured") this.chosen = "bytes";
    this.choices();
    this.show();
  }

  choices() {
    const offered = [["bytes", "bytes per step"]];
    if (this.traffic.links !== null && this.traffic.rows.length) offered.push(["time", "time per step"]);
    if (this.stats !== null) offered.push(["measured", "measured by the run"]);
    byId("measures").replaceChildren(...(offered.length < 2 ? [] : [choice("show", "measure", offered, this.chosen, (name) => {
      this.chosen = name;
      this.show();
    })]));
  }

  note() {
    const { rows, links } = this.traffic;
    if (this.chosen === "measured") {
      return `Counted by rank 0 over ${count(this.steps, "step")}: its calls through meshcomm, with bytes as in nccl-tests. Calls made by torch itself (FSDP, pipelining) are not included.`;
    }
    if (!rows.length) return "No traffic: every dim that the training uses has one rank.";
    const model = "One step of the rank with the most layers, predicted from the configuration, not measured; small calls are left out.";
    if (links === null) return `${model} It is not known which ranks share a node (topology.ranks_per_node), so there are no times.`;
    return `${model}${this.chosen === "time" ? " Calls run one after the other, without overlap with computation." : ""} Links: ${links.join("; ")}.`;
  }

  show() {
    const measure = TRAFFIC[this.chosen];
    const rows = this.chosen === "measured"
      ? this.stats.map((row) => ({ ...row, along: [row.dim].flat(), line: measuredLine(row) }))
      : this.traffic.rows.map((row) => ({ ...row, line: predictedLine(row) }));
    const groups = trafficGroups(rows, measure);
    const most = Math.max(...groups.map(({ total }) => total), 1e-30);
    byId("bars").replaceChildren(...groups.map((group) => this.bar(group, measure, most)), el("p", { class: "quiet", text: this.note() }));
  }

  bar(group, measure, most) {
    const family = this.mesh.family(group.along);
    const name = el("button", { type: "button", text: group.name, title: "show the groups along this dim" });
    if (family) name.addEventListener("click", () => this.turn(group.along));
    else name.disabled = true;
    const colour = (i) => ({ "--ring": (family?.hue ?? 0).toFixed(1), "--shade": ((i % 4) * 0.07 - 0.07).toFixed(2) });
    const segments = group.rows.map((row, i) => {
      const segment = el("div", { title: row.line, ...colour(i) });
      segment.style.width = `${(100 * measure.of(row)) / most}%`;
      return segment;
    });
    return el("div", { class: "flow", "data-along": group.name, "data-total": group.total },
      el("div", { class: "head" }, name, el("span", { class: "quiet", text: family ? count(family.size, "rank") : "" }), el("span", { class: "sum", text: measure.text(group.total) })),
      el("div", { class: "track", "aria-hidden": "true" }, ...segments),
      el("ul", {}, ...group.rows.map((row, i) => el("li", {}, el("i", colour(i)), row.line))));
  }
}

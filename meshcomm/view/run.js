// The run: requested once a second, and drawn as it progresses.

const ASK_MS = 1000, ASK_ENDED_MS = 2000;

class Run {
  // kept: the page is a file with the state of the run at the time of writing. traffic: receives the run's measurements.
  constructor(facts, kept, traffic) {
    this.facts = facts;
    this.traffic = traffic;
    this.kept = kept;
    this.columns = { step: [], loss: [], tokens_per_s: [] };
    this.charts = [
      [new Chart(byId("charts"), { name: "loss", hue: 250, axis: digits, text: (y) => `${y.toFixed(4)} nats per byte` }), "loss"],
      [new Chart(byId("charts"), { name: "tokens/s", hue: 150, zero: true, axis: (y) => (y >= 10000 ? `${digits(y / 1000)}k` : digits(y)), text: digits }), "tokens_per_s"],
    ];
  }

  // news: as from run_news.
  take(news) {
    this.news = news;
    if (news.reset) for (const key of Object.keys(this.columns)) this.columns[key] = [];
    for (const key of Object.keys(this.columns)) for (const value of news.columns[key]) this.columns[key].push(value);
    if (news.reset || news.columns.step.length) for (const [chart, key] of this.charts) chart.update(this.columns.step, this.columns[key]);
    this.tell();
  }

  tell() {
    const { news, columns } = this;
    byId("run").hidden = byId("state").hidden = news.state === "none";
    if (news.state === "none") return;
    const about = news.about;
    const step = columns.step.at(-1) ?? 0, steps = about?.steps ?? this.facts.trains?.steps;
    const rate = columns.tokens_per_s.at(-1), each = about?.tokens_per_step ?? this.facts.trains?.tokens_per_step;
    const perStep = rate ? each / rate : null;
    // Silent: no line for the time of ten steps, and for at least 30 seconds.
    const silent = news.state === "running" && !this.kept && news.age_s !== null && news.age_s > Math.max(30, 10 * (perStep ?? 3));
    const left = news.state === "running" && !silent && !this.kept && perStep !== null ? `, ${durationText((steps - step) * perStep)} left` : "";
    const done = steps ? `step ${step.toLocaleString("en")} of ${steps.toLocaleString("en")}` : `step ${step.toLocaleString("en")}`;
    const text = {
      waiting: "not started yet",
      running: silent ? `no new metrics for ${durationText(news.age_s)}, ${done}` : this.kept ? `${done} when this was written` : `running, ${done}${left}`,
      finished: `finished, ${done}`,
      stopped: `stopped after ${done}`,
      unknown: `${done}; it is not known whether it is running`,
    }[news.state];
    this.state(silent ? "silent" : news.state, text);
    const dims = Object.entries(about?.dims ?? {});
    const other = about && JSON.stringify(dims) !== JSON.stringify(this.facts.base);
    byId("progress").textContent = news.state === "waiting" ? `Waiting for ${news.folder} and its metrics.jsonl.`
      : `${news.folder}${about ? `: ${about.parameters.toLocaleString("en")} parameters, ${about.tokens_per_step.toLocaleString("en")} tokens a step` : ""}`;
    byId("charts").hidden = !columns.step.length;
    byId("meter").hidden = !steps || news.state === "waiting";
    byId("meter").setAttribute("aria-valuemax", steps ?? 0);
    byId("meter").setAttribute("aria-valuenow", step);
    byId("meter").firstElementChild.style.width = `${steps ? (100 * step) / steps : 0}%`;
    const problem = byId("problem");
    problem.hidden = !other;
    if (other) problem.textContent = `The run in ${news.folder} has a different mesh from the one on this page: ${dims.map(([name, size]) => `${name} ${size}`).join(", ")}. "meshcomm view ${news.folder}" shows it.`;
    this.end(about);
  }

  end(about) {
    const ended = about?.ended, rows = [];
    if (about?.resumed) rows.push(["resumed", `after step ${about.resumed.toLocaleString("en")}`]);
    if (ended?.seconds) rows.push(["time", `${durationText(ended.seconds)}, ${digits(ended.tokens / ended.seconds)} tokens/s on average`]);
    if (ended?.reason) rows.push(["reason for the end", ended.reason]);
    this.traffic?.measured(ended?.stats?.length ? ended.stats : null, ended?.stats_steps);
    for (const [dim, { rank, mean_s }] of Object.entries(ended?.late ?? {})) rows.push([`straggler along ${dim}`, `rank ${rank}, ${secondsText(mean_s)} after the first, on average (measured)`]);
    byId("outcome").replaceChildren(...rows.flatMap(([name, text]) => [el("dt", { text: name }), el("dd", { text })]));
  }

  state(kind, text) {
    const chip = byId("state");
    if (chip.dataset.state !== kind || chip.textContent !== text) { chip.dataset.state = kind; chip.textContent = text; }
  }

  // Request now, then repeatedly.
  follow() {
    document.addEventListener("visibilitychange", () => this.waiting && this.ask());
    this.ask();
  }

  async ask() {
    let wait = ASK_MS;
    clearTimeout(this.waiting);
    this.waiting = undefined;
    try {
      const { id, offset } = this.news ?? { id: "", offset: 0 };
      const answer = await fetch(`run.json?id=${encodeURIComponent(id)}&offset=${offset}`);
      if (!answer.ok) throw new Error(answer.statusText);
      this.take(await answer.json());
      if (this.news.more) wait = 0;
      else if (this.news.state === "finished" || this.news.state === "stopped") wait = ASK_ENDED_MS;
    } catch {
      byId("state").hidden = false;
      this.state("gone", "meshcomm view has ended");
    }
    this.waiting = setTimeout(() => this.ask(), wait);
  }
}

// Assembles the page: the choices, the rank under the pointer, and the pinned rank.

// A row of exclusive choices. choices: [value, label] or [value, label, small].
function choice(legend, name, choices, chosen, take) {
  const boxes = choices.map(([value, label, small, title]) => {
    const input = el("input", { type: "radio", name, value, checked: value === chosen ? "" : null });
    input.addEventListener("change", () => take(value));
    return el("label", { title }, input, el("span", {}, label, ...(small ? [" ", el("small", { text: small })] : [])));
  });
  return el("fieldset", { id: `choose-${name}` }, el("legend", { text: legend }), ...boxes);
}

// kept: see Run. Returns the Run, or null without a training.
function start(facts, kept) {
  const mesh = new Mesh(facts);
  const chosen = { family: mesh.families.find(({ size }) => size > 1) ?? mesh.families[0], by: "group" };
  let pointed, held, only;

  byId("title").textContent = facts.title;
  byId("title").title = facts.source;
  document.title = `${facts.title} · meshcomm`;
  byId("summary").textContent = `${count(mesh.world, "rank")} · ${count(facts.groups, "group")}, ${facts.groups_per_rank} created per rank · plan ${facts.fingerprint}`;

  const picture = new Picture(byId("picture"), mesh, {
    rank: (position) => { pointed = position; light(); },
    hold: (position) => hold(held === position ? undefined : position),
  });

  const smallest = mesh.families.slice().sort((a, b) => (a.kind === "dim" ? 0 : 1) - (b.kind === "dim" ? 0 : 1) || a.size - b.size);
  function light() {
    const position = pointed ?? held;
    picture.light(position, only ? [only] : [chosen.family, ...smallest]);
    if (position !== undefined) tell(position);
  }

  let told = "";
  function tell(position) {
    // A button that is recreated between press and release never receives a click.
    if (told === `${position} ${position === held}`) return;
    told = `${position} ${position === held}`;
    byId("said").textContent = showRank(byId("rank"), mesh, position, position === held, {
      only: (family) => { only = family; if (family) picture.light(position, [family]); else light(); },
      turn: (family) => { only = undefined; hold(position); turn(family); },
      release: () => hold(undefined),
    });
  }

  function hold(position) {
    const before = held;
    held = position;
    document.body.classList.toggle("held", held !== undefined);
    if (position !== undefined && !picture.cells.has(position)) show();
    picture.hold(held);
    light();
    // The held rank stays in the panel, but is no longer marked as held.
    if (before !== undefined && held === undefined && pointed === undefined) tell(before);
  }

  function turn(family) {
    chosen.family = family;
    for (const input of document.querySelectorAll("input[name=turn]")) input.checked = input.value === family.name;
    show();
  }

  function show() {
    const { family, by } = chosen;
    const arrangement = arranged(mesh, family, by, held);
    picture.show(arrangement, family);
    picture.hold(held);
    light();
    // Numbers that fit need no choice, and chosen numbers must not disappear with it.
    byId("choose-cells").hidden = picture.numbered && !picture.legible;
    byId("caption").textContent = [
      family.size === 1 ? `${family.name}: one rank, no group` : `${family.name}: ${count(mesh.world / family.size, "group")} of ${count(family.size, "rank")}`,
      ...family.record,
      facts.trains?.parts[family.name] ? `${facts.trains.parts[family.name]} parallelism` : "",
    ].filter(Boolean).join(" · ");
    const folded = arrangement.drawn < mesh.world;
    byId("note").textContent = [
      by === "group" && !picture.plan?.broken ? "Each row is a group, and so is each color." : "Each color is a group.",
      mesh.perNode === null ? "It is not known which ranks share a node (topology.ranks_per_node)." : "Lines are the borders of nodes.",
      folded ? `${arrangement.drawn.toLocaleString("en")} of ${count(mesh.world, "rank")} drawn: the first and last along each dim; find a rank to see it with its neighbors.` : "",
    ].filter(Boolean).join(" ");
  }

  byId("turn").replaceWith(choice("groups along", "turn", mesh.families.map((family) => [family.name, family.name, `×${family.size.toLocaleString("en")}`,
    family.kind === "dim" ? null : `${family.kind} ${family.kind === "merged" ? family.dims.join(" ") : ""}`.trim()]), chosen.family.name,
  (name) => turn(mesh.family(name))));
  byId("arrange").replaceWith(choice("arrange by", "arrange", [["group", "group"], mesh.perNode === null ? ["rank", "rank"] : ["node", "node"]], "group", (by) => {
    chosen.by = by;
    show();
  }));
  byId("cells").replaceWith(choice("cells", "cells", [["fit", "small"], ["numbers", "with numbers"]], "fit", (size) => {
    picture.enlarge(size === "numbers");
    light();
  }));
  byId("find").max = mesh.largest;
  byId("find").addEventListener("input", (event) => {
    const position = event.target.value === "" ? undefined : mesh.position(Number(event.target.value));
    event.target.setCustomValidity(event.target.value !== "" && position === undefined ? "the mesh does not have this rank" : "");
    hold(position);
  });
  byId("find").addEventListener("change", () => picture.cells.get(held)?.scrollIntoView({ block: "center", behavior: "smooth" }));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { pointed = undefined; byId("find").value = ""; hold(undefined); }
  });
  show();
  new ResizeObserver(() => picture.width !== picture.host.clientWidth && show()).observe(picture.host);

  const trains = facts.trains !== null;
  byId("traffic").hidden = facts.traffic === null;
  byId("run").hidden = !trains;
  const traffic = facts.traffic && new Traffic(mesh, facts.traffic, (along) => { turn(mesh.family(along)); byId("mesh").scrollIntoView({ behavior: "smooth", block: "nearest" }); });
  return trains ? new Run(facts, kept, traffic) : null;
}

async function load() {
  const inside = byId("data").textContent.trim();
  if (inside) {
    const { facts, run } = JSON.parse(inside);
    const shown = start(facts, true);
    if (shown && run && run.state !== "none") shown.take({ ...run, reset: true });
  } else {
    const answer = await fetch("facts.json");
    if (!answer.ok) throw new Error(`facts.json: ${answer.status} ${answer.statusText}`);
    start(await answer.json(), false)?.follow();
  }
  document.documentElement.dataset.ready = "yes";
}

load().catch((error) => {
  byId("problem").hidden = false;
  byId("problem").textContent = `The page cannot be shown: ${error.message}`;
  throw error;
});

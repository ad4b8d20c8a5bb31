// The description of one rank: its place, and its group along every dim.

// Ranks of a group in coord order, shortened; the rank itself is always included.
function groupRanks(mesh, position, family) {
  const own = coordOf(position, family.digits);
  const coords = shown(family.size, 16, family.size > 16 ? own : undefined);
  return coords.map((coord) => (coord === null ? null : { rank: mesh.rank(mesh.member(position, family, coord)), own: coord === own }));
}

function groupEntry(mesh, position, family, on) {
  const own = coordOf(position, family.digits);
  const at = (coord) => mesh.rank(mesh.member(position, family, (coord + family.size) % family.size));
  const nodes = new Set();
  if (mesh.perNode !== null && family.size > 1 && family.size <= 4096) {
    for (let coord = 0; coord < family.size; coord++) nodes.add(mesh.node(at(coord)));
  }
  const facts = [family.kind === "dim" ? "" : family.kind === "merged" ? family.dims.join(" + ") : family.kind,
    family.shares ? `the same groups as ${family.shares}` : "",
    nodes.size ? (nodes.size === 1 ? "inside one node" : `over ${nodes.size} nodes`) : ""].filter(Boolean).join(" · ");
  const ranks = family.size === 1
    ? [el("span", { class: "quiet", text: "one rank: no group" })]
    : groupRanks(mesh, position, family).flatMap((each) => [
      each === null ? "… " : each.own ? el("b", { text: each.rank }) : String(each.rank), each === null ? "" : " "]);
  const entry = el("button", { class: "group", type: "button", "data-family": family.name, "--ring": family.hue.toFixed(1), title: "click to show the groups along this dim" },
    el("span", { class: "head" }, el("span", { class: "swatch" }), el("span", { class: "name", text: family.name }),
      el("span", { class: "quiet", text: `group rank ${own} of ${family.size.toLocaleString("en")}${facts ? ` · ${facts}` : ""}` })),
    el("span", { class: "ranks" }, ...ranks),
    ...(family.size > 1 ? [el("span", { class: "quiet", text: `ring neighbors: previous ${at(own - 1)}, next ${at(own + 1)}` })] : []));
  entry.addEventListener("pointerenter", () => on.only(family));
  entry.addEventListener("pointerleave", () => on.only(undefined));
  entry.addEventListener("focus", () => entry.matches(":focus-visible") && on.only(family));
  entry.addEventListener("blur", () => on.only(undefined));
  entry.addEventListener("click", () => on.turn(family));
  return entry;
}

// held: the rank stays when the pointer leaves. on: { only(family), turn(family), release() }.
function showRank(host, mesh, position, held, on) {
  const rank = mesh.rank(position), node = mesh.node(rank);
  const head = el("h3", {}, `rank ${rank}`, ...(node === null ? [] : [el("small", { text: `node ${node}` })]));
  if (held) {
    const release = el("button", { class: "hold", type: "button", text: "pinned · unpin" });
    release.addEventListener("click", on.release);
    head.append(release);
  }
  const lines = [...mesh.homes.keys()].map((home) => el("p", { class: home ? "coords quiet" : "coords", text: `${home ? `${home}: ` : ""}${coordsText(mesh.coords(position, home))}` }));
  host.replaceChildren(head, ...lines, ...mesh.families.map((family) => groupEntry(mesh, position, family, on)));
  const groups = mesh.families.filter(({ size }) => size > 1 && size <= 16).map((family) =>
    `${family.name}: ${groupRanks(mesh, position, family).map(({ rank }) => rank).join(", ")}`);
  return `rank ${rank}, ${coordsText(mesh.coords(position, ""))}. ${groups.join(". ")}`;
}

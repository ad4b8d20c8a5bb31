// Ranks and groups from sizes and strides, as in meshcomm.layout. This file never lists all groups.

const sizeOf = (digits) => digits.reduce((product, [size]) => product * size, 1);

function coordOf(position, digits) {
  let value = 0;
  for (const [size, stride] of digits) value = value * size + (Math.floor(position / stride) % size);
  return value;
}

function offsetOf(coord, digits) {
  let value = 0;
  for (const [size, stride] of [...digits].reverse()) {
    value += (coord % size) * stride;
    coord = Math.floor(coord / size);
  }
  return value;
}

class Mesh {
  constructor(facts) {
    this.world = facts.world_size;
    this.perNode = facts.ranks_per_node;
    this.order = facts.rank_order;
    this.places = this.order && new Map(this.order.map((rank, position) => [rank, position]));
    this.largest = this.order ? this.order.reduce((a, b) => Math.max(a, b)) : this.world - 1;
    this.homes = new Map([["", facts.base], ...facts.views]);
    this.families = facts.dims.map((dim) => ({ ...dim }));
    this.families.forEach((family, index) => {
      family.hue = 25 + (index * 360) / this.families.length;
    });
  }

  rank(position) { return this.order ? this.order[position] : position; }

  // undefined if the mesh does not have the rank.
  position(rank) {
    if (this.places) return this.places.get(rank);
    return Number.isInteger(rank) && rank >= 0 && rank < this.world ? rank : undefined;
  }

  node(rank) { return this.perNode === null ? null : Math.floor(rank / this.perNode); }

  // The family of a name, or of several dims without a declared merged dim; undefined for unknown dims.
  family(names) {
    const dims = [names].flat();
    const known = this.families.find((each) => dims.length === 1 && each.name === dims[0])
      ?? this.families.find((each) => String(each.dims) === String(dims));
    if (known) return known;
    const found = [...this.homes].find(([, sizes]) => dims.every((dim) => sizes.some(([name]) => name === dim)));
    if (!found) return undefined;
    const [home] = found;
    const digits = dims.flatMap((dim) => this.family(dim).digits);
    const size = sizeOf(digits);
    return { name: dims.join(" + "), kind: "together", record: ["no group of its own is declared"], dims, home, digits, size, hue: this.family(dims[0]).hue, groups: this.world / size, shares: null };
  }

  // The other dims of a family's factorization, outermost first, with their strides.
  others(family) {
    let stride = this.world;
    return this.homes.get(family.home)
      .map(([name, size]) => ({ name, size, stride: (stride /= size) }))
      .filter(({ name }) => !family.dims.includes(name));
  }

  restDigits(family) {
    family.rest ??= this.others(family).map(({ size, stride }) => [size, stride]);
    return family.rest;
  }

  groupIndex(position, family) { return coordOf(position, this.restDigits(family)); }

  sameGroup(a, b, family) { return this.groupIndex(a, family) === this.groupIndex(b, family); }

  // The position with this coord in the group of another position.
  member(position, family, coord) {
    return position - offsetOf(coordOf(position, family.digits), family.digits) + offsetOf(coord, family.digits);
  }

  coords(position, home) {
    let stride = this.world;
    return this.homes.get(home).map(([name, size]) => [name, Math.floor(position / (stride /= size)) % size]);
  }
}

// A hue for each group, far from the hues of adjacent groups for any number of groups.
const groupHue = (index, groups) => (groups <= 10 ? 20 + (index * 360) / groups : 20 + ((index * 137.508) % 360));

const coordsText = (coords) => coords.map(([name, coord]) => `${name}=${coord}`).join(" ");

// An enlarged label next to the cell under the pointer, for pictures whose cells are too small for numbers.
class Lens {
  constructor(svg) {
    this.plate = draw("rect", { rx: 5, height: 22 });
    this.words = draw("text", { y: 11 });
    this.mark = draw("g", { class: "lens", "aria-hidden": "true", visibility: "hidden" }, this.plate, this.words);
    svg.append(this.mark);
  }

  // at: { x, y } of the cell, or undefined; width: that of the picture.
  show(words, at, side, width) {
    this.mark.setAttribute("visibility", at ? "visible" : "hidden");
    if (!at) return;
    this.words.textContent = words;
    const wide = this.words.getComputedTextLength() + 16;
    this.plate.setAttribute("width", wide);
    this.words.setAttribute("x", wide / 2);
    const x = Math.max(0, Math.min(width - wide, at.x + side / 2 - wide / 2));
    this.mark.setAttribute("transform", `translate(${x}, ${at.y < 26 ? at.y + side + 6 : at.y - 28})`);
  }
}

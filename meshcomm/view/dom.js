// Elements, and numbers in readable form.

const SVG = "http://www.w3.org/2000/svg";

// style: custom properties only. The page's policy forbids style attributes, so they are set one by one.
function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (name === "text") made.textContent = value;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

function digits(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1000) return Math.round(number).toLocaleString("en");
  return String(Number(number.toPrecision(size >= 1 ? 4 : 3)));
}

function scaled(number, units) {
  const [unit, size] = units.find(([, size]) => number >= size * 0.9995) ?? units.at(-1);
  const value = number / size;
  return `${value < 999.5 ? Number(value.toPrecision(3)) : Math.round(value).toLocaleString("en")} ${unit}`;
}
const bytesText = (number) => scaled(number, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]);
const secondsText = (number) => scaled(number, [["s", 1], ["ms", 1e-3], ["us", 1e-6]]);

function durationText(seconds) {
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const range = (size) => Array.from({ length: size }, (_, i) => i);

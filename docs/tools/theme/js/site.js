// Search, the menu of narrow windows, and copy buttons. Works from files too, so the index is a script and not JSON.
"use strict";
{
  const base = document.currentScript.dataset.base;
  const box = document.getElementById("search");
  const results = document.getElementById("results");
  let sections = null;

  // -- search ------------------------------------------------------------------------------------------

  function load() {
    if (sections !== null) return;
    sections = [];
    const script = document.createElement("script");
    script.src = `${base}/js/sections.js`;
    script.onload = () => {
      sections = window.sections.map(([page, title, location, text]) => ({
        page, title, location, text, names: title.toLowerCase(), pages: page.toLowerCase(), words: text.toLowerCase(),
      }));
      search();
    };
    document.head.append(script);
  }

  // Where a word of `text` begins with `part`; -1 where none does.
  function begins(text, part) {
    let at = text.indexOf(part);
    while (at > 0 && /[a-z0-9]/.test(text[at - 1])) at = text.indexOf(part, at + 1);
    return at;
  }

  // -Infinity unless the section has every word.
  function score(section, words) {
    let sum = 0;
    for (const word of words) {
      const at = begins(section.names, word);
      if (section.names === word || section.names.endsWith(`.${word}`)) sum += 100;
      else if (at >= 0) sum += at === 0 || section.names[at - 1] === "." ? 40 : 30;
      else if (section.names.includes(word)) sum += 15;
      else if (begins(section.pages, word) >= 0) sum += 8;
      else if (begins(section.words, word) >= 0) sum += 4;
      else if (section.words.includes(word)) sum += 1;
      else return -Infinity;
    }
    const phrase = words.join(" ");
    if (words.length > 1 && section.names.includes(phrase)) sum += 50;
    else if (words.length > 1 && section.words.includes(phrase)) sum += 20;
    // The reference first; rows of tables last.
    return sum + (section.location.startsWith("reference/") ? 5 : 0) - (section.page.includes("›") ? 10 : 0);
  }

  function element(name, text, ...inner) {
    const made = document.createElement(name);
    made.append(...(text ? [text] : []), ...inner);
    return made;
  }

  // The text around the first word that is in it, with all words marked.
  function excerpt(section, words) {
    const first = Math.max(0, ...words.map((word) => begins(section.words, word)).filter((at) => at > 0).slice(0, 1));
    const from = first < 60 ? 0 : section.text.indexOf(" ", first - 50) + 1;
    const text = section.text.slice(from, from + 160);
    const marks = new RegExp(`(${words.map((word) => word.replace(/[^\w]/g, "\\$&")).join("|")})`, "i");
    const parts = text.split(marks).map((part, at) => (at % 2 ? element("mark", part) : part));
    return element("p", from ? "… " : "", ...parts);
  }

  function search() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    results.hidden = !words.length;
    if (!words.length || !sections.length) return results.replaceChildren();
    const found = sections.map((section) => [score(section, words), section]).filter(([sum]) => sum > -Infinity);
    found.sort(([a, one], [b, other]) => b - a || one.title.length - other.title.length);
    const shown = found.slice(0, 30).map(([, section]) => {
      const where = section.title === section.page ? "" : section.page;
      const link = element("a", "", element("strong", section.title), element("small", where), excerpt(section, words));
      link.href = `${base}/${section.location}`;
      return element("li", "", link);
    });
    const count = found.length > 30 ? `30 of ${found.length} results` : `${found.length} results`;
    results.replaceChildren(element("p", found.length ? count : "Nothing found"), element("ol", "", ...shown));
  }

  box.addEventListener("focus", load);
  box.addEventListener("input", () => (load(), search()));
  box.addEventListener("focus", () => (results.hidden = !box.value.trim()));
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[role=search]")) results.hidden = true;
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      box.focus();
    }
    const links = [...results.querySelectorAll("a")];
    if (!event.target.closest("[role=search]") || !links.length) return;
    const at = links.indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      (links[to] ?? (to < 0 ? box : links[at])).focus();
    } else if (event.key === "Enter" && at < 0) {
      links[0].click();
    } else if (event.key === "Escape") {
      box.focus();
      results.hidden = true;
    }
  });

  // -- menu --------------------------------------------------------------------------------------------

  const menu = document.getElementById("menu");
  menu.addEventListener("click", () => {
    menu.setAttribute("aria-expanded", menu.getAttribute("aria-expanded") !== "true");
  });
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest" });

  // -- code --------------------------------------------------------------------------------------------

  // What a reader would type: without prompts and output.
  function code(block) {
    const copy = block.cloneNode(true);
    const prompts = copy.querySelectorAll(".gp");
    if (prompts.length) copy.querySelectorAll(".gp, .go, .gt").forEach((each) => each.remove());
    const lines = copy.textContent.trimEnd().split("\n");
    return lines.filter((line) => line.trim() || !prompts.length).join("\n") + "\n";
  }

  async function write(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    // Pages that are not served by HTTPS have no clipboard.
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }

  for (const block of document.querySelectorAll("main .codehilite pre")) {
    const button = element("button", "Copy");
    button.className = "copy";
    button.addEventListener("click", async () => {
      await write(code(block));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.parentElement.append(button);
  }
  for (const box of document.querySelectorAll("main pre, main .table")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}

// Applies the colours of the style sheet, follows the light or dark scheme, and shows and hides renderers by the keys
// and by the zoom.
(() => {
  "use strict";
  const PIECES_PER_PIXEL = 0.4; // more pieces would blend into each other, so the coarse level is shown instead
  const LETTER = 6.5; // px: the width of a letter of an epoch's label
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const hidden = new Set(); // names of renderers that the user has switched off

  function figures() {
    return Bokeh.documents.flatMap((doc) => doc.roots());
  }

  function paint() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    for (const fig of figures()) {
      fig.outline_line_color = colour("line");
      for (const axis of [...fig.below, ...fig.left]) {
        axis.axis_label_text_color = colour("faint");
        axis.major_label_text_color = colour("ink");
        axis.axis_line_color = colour("line");
        axis.major_tick_line_color = colour("line");
      }
      for (const thing of fig.center) {
        if (thing.grid_line_color !== undefined) thing.grid_line_color = colour("line");
        if (thing.text_color !== undefined && thing.tags.length) thing.text_color = colour(thing.tags[0]);
      }
      for (const tool of fig.toolbar.tools) {
        if (tool.overlay?.tags?.length) tool.overlay.line_color = colour(tool.overlay.tags[0]);
      }
      for (const drawn of fig.renderers) {
        if (drawn.tags.length) paintGlyph(drawn.glyph, drawn.tags[0], colour);
      }
    }
  }

  function paintGlyph(glyph, name, colour) {
    const own = { value: colour(name) };
    if (glyph.text_color !== undefined) glyph.text_color = own;
    if (glyph.fill_color !== undefined) glyph.fill_color = own;
    if (glyph.hatch_color !== undefined) glyph.hatch_color = own;
    if (glyph.line_color === undefined) return;
    // A marker is outlined in the background colour, to stand out from what it covers; boxes have no outline.
    if (glyph.marker !== undefined) glyph.line_color = { value: colour("paper") };
    else if (glyph.fill_color === undefined) glyph.line_color = own;
  }

  function level(fig) {
    const [piecesPerSecond] = fig.tags;
    const seconds = fig.x_range.end - fig.x_range.start;
    return piecesPerSecond * seconds > PIECES_PER_PIXEL * (fig.inner_width || 1) ? "coarse" : "fine";
  }

  function show() {
    for (const fig of figures()) {
      const now = fig.tags.length ? level(fig) : "";
      for (const drawn of fig.renderers) {
        const visible = !hidden.has(drawn.name) && (!drawn.tags[1] || drawn.tags[1] === now);
        if (drawn.visible !== visible) drawn.visible = visible;
      }
    }
  }

  // Labels of epochs, from the last one back: one that would touch the one to its right, or the edge, is left out.
  function labelEpochs() {
    for (const fig of figures()) {
      const drawn = fig.renderers.find((one) => one.name === "epoch-names");
      if (!drawn) continue;
      const { x, name, epoch } = drawn.data_source.data;
      const { start, end } = fig.x_range;
      const order = [...x.keys()].sort((a, b) => x[b] - x[a]);
      const shown = new Array(x.length).fill("");
      let free = Infinity; // px from the left of the plot, to the right of which labels are
      for (const at of order) {
        const right = ((x[at] - start) / (end - start)) * (fig.inner_width || 1) - 4;
        const left = right - LETTER * epoch[at].length;
        if (left < 0 || right > Math.min(free, fig.inner_width || 1)) continue;
        shown[at] = epoch[at];
        free = left - LETTER;
      }
      if (shown.some((text, at) => text !== name[at])) drawn.data_source.data = { ...drawn.data_source.data, name: shown };
    }
  }

  function update() {
    show();
    labelEpochs();
  }

  function toggle(key) {
    const shown = key.getAttribute("aria-pressed") !== "true";
    for (const name of JSON.parse(key.dataset.names)) shown ? hidden.delete(name) : hidden.add(name);
    key.setAttribute("aria-pressed", String(shown));
    show();
  }

  // Where a table is too wide for the screen its rows are cards, in which a cell shows the heading of its column.
  function nameCells() {
    for (const table of document.querySelectorAll(".fit table")) {
      const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
      for (const row of table.querySelectorAll("tbody tr")) {
        [...row.children].forEach((cell, at) => { cell.dataset.head = heads[at]; });
      }
    }
  }

  function deactivateTouchTools() {
    for (const fig of figures()) {
      for (const tool of fig.toolbar.tools) {
        if (tool.event_types?.some((type) => ["pan", "pinch", "scroll"].includes(type))) tool.active = false;
      }
    }
  }

  function begin() {
    if (!Bokeh.documents.length && document.querySelector("figure")) {
      requestAnimationFrame(begin);
      return;
    }
    paint();
    update();
    if (coarse.matches) deactivateTouchTools();
    dark.addEventListener("change", paint);
    for (const fig of figures().filter((fig) => fig.renderers.some((one) => one.name === "epoch-names"))) {
      fig.x_range.change.connect(update);
      fig.properties.inner_width.change.connect(update);
    }
    for (const key of document.querySelectorAll(".key")) key.addEventListener("click", () => toggle(key));
    document.documentElement.dataset.ready = "yes";
  }

  nameCells();
  begin();
})();

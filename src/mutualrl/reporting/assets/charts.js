// Charts: lines and bars as SVG in the page's own pixels, so that text keeps its size at every width. One step is shown
// in all line charts at once, by pointer or by keyboard. Names are inserted as text, never as markup.
const charts = (() => {
  const data = JSON.parse(document.getElementById("charts").textContent);
  const hidden = new Set(), views = [], HEIGHT = 200, CHARACTER = 7.2, TOP = 10, RIGHT = 12, BOTTOM = 22;
  let withRuns = false, whenChosen = null;

  const svg = (tag, attributes, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const html = (tag, name, ...children) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    node.append(...children);
    return node;
  };
  const sign = (label) => data.signs[label];
  const dashes = (label, width = 1.6) => sign(label).dash.map((part) => part * width).join(" ");
  const sample = (label) => svg("svg", { width: 26, height: 10, "aria-hidden": "true", focusable: "false" },
    svg("line", { x1: 1, y1: 5, x2: 25, y2: 5, stroke: sign(label).colour, "stroke-width": 2.4, "stroke-dasharray": dashes(label, 2) }));
  const steps = (x) => Array.isArray(x) ? x : Array.from({ length: x.to - x.from + 1 }, (_, i) => x.from + i);

  // Return about `most` round numbers from `low` to `high`: 1, 2 or 5 times a power of ten apart; whole ones if wanted.
  const ticks = (low, high, most, whole) => {
    const raw = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw || 1));
    let gap = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999);
    if (whole) gap = Math.max(1, Math.round(gap));
    const found = [];
    for (let n = Math.ceil(low / gap - 1e-9); n * gap <= high + gap * 1e-9; n++) found.push(Number((n * gap).toPrecision(12)));
    return found;
  };
  const tick = (value, values) => {
    const gap = values.length > 1 ? values[1] - values[0] : Math.abs(value), decimals = Math.ceil(-Math.log10(gap || 1) - 1e-9);
    return Math.abs(value) >= 1e6 || gap < 1e-9 ? value.toExponential(2) : value.toFixed(Math.max(0, Math.min(10, decimals)));
  };
  const brief = (value) => Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1).replace("e+", "e") : String(Number(value.toPrecision(4)));
  const nearest = (x, step) => {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= step) low = middle; else high = middle;
    }
    return Math.abs(x[low] - step) <= Math.abs(x[high] - step) ? low : high;
  };

  const linePanel = (panel, box) => {
    const lines = panel.lines.map((line) => ({ ...line, x: steps(line.x) }));
    const singles = (panel.singles || []).map((line) => ({ ...line, x: steps(line.x) }));
    const all = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const [bottom, top] = panel.limits, [first, last] = [all[0], all[all.length - 1]];
    const plot = html("div", "plot"), readout = html("p", "readout");
    plot.tabIndex = 0;
    for (const [name, value] of Object.entries({ role: "slider", "aria-label": `${panel.title}, ${panel.x}`, "aria-valuemin": first, "aria-valuemax": last })) plot.setAttribute(name, value);
    box.append(html("h4", "", panel.title), html("p", "unit", `${panel.y}, by ${panel.x}`), plot, readout);
    let place = null, cursor = null;
    const shown = () => lines.filter((line) => !hidden.has(line.label));

    const draw = () => {
      const width = Math.max(200, plot.clientWidth), height = HEIGHT;
      const rows = ticks(bottom, top, 4), left = Math.max(1, ...rows.map((value) => tick(value, rows).length)) * CHARACTER + 10;
      const x = (step) => left + (last > first ? (step - first) / (last - first) : 0.5) * (width - left - RIGHT);
      const y = (value) => TOP + ((top - value) / (top - bottom)) * (height - TOP - BOTTOM);
      const image = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
      for (const value of rows) {
        image.append(svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }));
        image.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, tick(value, rows)));
      }
      for (const step of last > first ? ticks(first, last, Math.max(2, Math.floor((width - left) / 90)), true) : [first])
        image.append(svg("text", { x: x(step), y: height - 4, "text-anchor": step === first && last > first ? "start" : x(step) > width - 24 ? "end" : "middle" }, String(step)));
      image.append(svg("line", { class: "axis", x1: left, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }));
      const inside = (value) => Math.min(Math.max(value, bottom), top);
      const path = (xs, ys) => xs.map((step, i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(inside(ys[i])).toFixed(1)}`).join("");
      for (const line of shown()) if (line.low) {
        const back = [...line.x].reverse(), low = [...line.low].reverse();
        image.append(svg("path", { class: "band", d: path(line.x, line.high) + path(back, low).replace("M", "L") + "Z", fill: sign(line.label).colour }));
      }
      if (withRuns) for (const line of singles) if (!hidden.has(line.label))
        image.append(svg("path", { class: "run", d: path(line.x, line.y), stroke: sign(line.label).colour }, svg("title", {}, line.run)));
      for (const line of shown()) {
        const colour = sign(line.label).colour;
        image.append(svg("path", { class: "line", d: path(line.x, line.y), stroke: colour, "stroke-dasharray": dashes(line.label) }));
        line.x.forEach((step, i) => {
          const value = line.y[i], over = value > top, under = value < bottom;
          if (over || under) {
            const edge = over ? y(top) : y(bottom), tip = over ? edge - 7 : edge + 7;
            image.append(svg("path", { class: "outlier", d: `M${x(step) - 5} ${edge}L${x(step) + 5} ${edge}L${x(step)} ${tip}Z`, fill: colour }, svg("title", {}, `${line.label}, ${step}: ${value}`)));
          } else if (line.x.length <= 12) image.append(svg("circle", { cx: x(step), cy: y(value), r: 2.6, fill: colour }));
        });
      }
      cursor = svg("g", { class: "cursor" });
      image.append(cursor);
      plot.replaceChildren(image);
      place = { x, y, inside, left, width, height };
    };
    const show = (step) => {
      if (place === null) return;
      cursor.replaceChildren();
      if (step === null) { readout.replaceChildren(); return; }
      const at = all[nearest(all, step)];
      cursor.append(svg("line", { x1: place.x(at), x2: place.x(at), y1: TOP, y2: place.height - BOTTOM }));
      const parts = [], words = [];
      for (const line of shown()) {
        const i = nearest(line.x, at), spread = line.high ? ` (${line.low[i]} to ${line.high[i]})` : "";
        cursor.append(svg("circle", { cx: place.x(line.x[i]), cy: place.y(place.inside(line.y[i])), r: 4, fill: sign(line.label).colour }));
        const value = `${line.y[i]}${spread}${line.x[i] === at ? "" : ` at ${line.x[i]}`}`;
        parts.push(html("span", "value", sample(line.label), ` ${line.label} `, html("b", "", value)));
        words.push(`${line.label} ${value}`);
      }
      readout.replaceChildren(html("span", "value", `${panel.x} ${at}:`), ...parts);
      plot.setAttribute("aria-valuenow", at);
      plot.setAttribute("aria-valuetext", `${panel.x} ${at}: ${words.join(", ") || "no line is shown"}`);
    };
    const under = (event) => {
      const at = event.clientX - plot.getBoundingClientRect().left;
      const share = (at - place.left) / (place.width - place.left - RIGHT);
      return all[nearest(all, first + Math.min(1, Math.max(0, share)) * (last - first))];
    };
    const move = (by) => {
      const at = nearest(all, Number(plot.getAttribute("aria-valuenow")));
      showAll(panel.x, all[Math.min(all.length - 1, Math.max(0, at + by))]);
    };
    const choose = () => {
      if (whenChosen && panel.x === "optimizer step") whenChosen(Number(plot.getAttribute("aria-valuenow")), panel.title);
    };
    const keys = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
    plot.addEventListener("pointermove", (event) => showAll(panel.x, under(event)));
    plot.addEventListener("pointerleave", () => { if (document.activeElement !== plot) showAll(panel.x, null); });
    plot.addEventListener("click", (event) => { if (event.clientX) showAll(panel.x, under(event)); choose(); });
    plot.addEventListener("keydown", (event) => {
      if (event.key in keys) move(keys[event.key]);
      else if (event.key === "Enter") choose();
      else return;
      event.preventDefault();
    });
    plot.setAttribute("aria-valuenow", last);
    plot.setAttribute("aria-valuetext", `${panel.x} ${first} to ${last}: ${lines.map((line) => `${line.label} ends at ${line.y[line.y.length - 1]}`).join(", ")}`);
    return { draw, show, x: panel.x, plot };
  };

  const barPanel = (panel, box) => {
    const plot = html("div", "plot bars");
    box.append(html("h4", "", panel.title), html("p", "unit", panel.y), plot);
    const draw = () => {
      const bars = panel.bars.filter((bar) => !hidden.has(bar.label));
      const categories = [...new Set(panel.bars.flatMap((bar) => bar.categories))];
      const width = Math.max(200, plot.clientWidth), BAR = 16, NAME = 20, VALUE = 9 * CHARACTER;
      const reach = bars.flatMap((bar) => bar.values.flatMap((value, i) => [value - (bar.errors[i] || 0), value + (bar.errors[i] || 0)]));
      const low = Math.min(0, ...reach), high = Math.max(0, ...reach), span = high - low || 1;
      const height = categories.length * (NAME + bars.length * BAR + 6) + 4, room = width - VALUE - (low < 0 ? VALUE : 0);
      const x = (value) => (low < 0 ? VALUE : 0) + ((value - low) / span) * room;
      const image = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${panel.title}: the table below has its values` });
      let y = 0;
      for (const category of categories) {
        image.append(svg("text", { x: 0, y: y + 14, class: "category" }, category));
        y += NAME;
        for (const bar of bars) {
          const i = bar.categories.indexOf(category);
          if (i >= 0) {
            const value = bar.values[i], error = bar.errors[i], colour = sign(bar.label).colour;
            image.append(svg("rect", { x: Math.min(x(0), x(value)), y: y + 1, width: Math.abs(x(value) - x(0)), height: BAR - 3, fill: colour }, svg("title", {}, `${bar.label}, ${category}: ${value}${error === null ? "" : ` ± ${error}`}`)));
            image.append(svg("line", { x1: x(0), x2: x(value), y1: y + BAR / 2 - 0.5, y2: y + BAR / 2 - 0.5, class: "hatch", "stroke-dasharray": dashes(bar.label) }));
            if (error) image.append(svg("line", { class: "whisker", x1: x(value - error), x2: x(value + error), y1: y + BAR / 2 - 0.5, y2: y + BAR / 2 - 0.5 }));
            const outer = value < 0 ? x(value - (error || 0)) - 4 : x(value + (error || 0)) + 4;
            image.append(svg("text", { x: outer, y: y + BAR - 4, "text-anchor": value < 0 ? "end" : "start" }, brief(value)));
          }
          y += BAR;
        }
        y += 6;
      }
      image.append(svg("line", { class: "axis", x1: x(0), x2: x(0), y1: 0, y2: height }));
      plot.replaceChildren(image);
    };
    return { draw, show: () => {}, x: null, plot };
  };

  const showAll = (x, step) => { for (const view of views) if (view.x === x) view.show(step); };
  const redraw = () => { for (const view of views) view.draw(); };
  const pressed = () => {
    for (const button of document.querySelectorAll(".legend button")) button.setAttribute("aria-pressed", button.dataset.runs ? withRuns : !hidden.has(button.dataset.label));
  };
  const legend = (figure) => {
    const labels = [...new Set(figure.panels.flatMap((panel) => [...panel.lines, ...(panel.bars || [])].map((each) => each.label)))];
    const box = html("div", "legend");
    const add = (button, onclick) => { button.type = "button"; button.addEventListener("click", () => { onclick(); pressed(); redraw(); }); box.append(button); };
    for (const label of labels) {
      const button = html("button", "plain", sample(label), ` ${label}`);
      button.dataset.label = label;
      add(button, () => { if (!hidden.delete(label)) hidden.add(label); });
    }
    if (figure.panels.some((panel) => panel.singles && panel.singles.length)) {
      const button = html("button", "plain", "single runs");
      button.dataset.runs = "1";
      add(button, () => { withRuns = !withRuns; });
    }
    return box;
  };

  // On a phone all figures but the first are folded: a page of one run would have twenty screens.
  const narrow = matchMedia("(max-width: 40rem)").matches;
  [...document.querySelectorAll("[data-chart]")].forEach((box, number) => {
    const figure = data.figures[box.dataset.chart], grid = html("div", "panels");
    grid.style.setProperty("--columns", Math.min(figure.columns, figure.panels.length));
    if (narrow && number > 0) {
      const folded = html("details", "folded", html("summary", "", figure.panels.length > 1 ? `Show ${figure.panels.length} charts` : "Show the chart"), legend(figure), grid);
      folded.addEventListener("toggle", redraw);
      box.append(folded);
    } else box.append(legend(figure), grid);
    for (const panel of figure.panels) {
      const cell = html("div", "panel");
      grid.append(cell);
      views.push(panel.bars ? barPanel(panel, cell) : linePanel(panel, cell));
    }
  });
  pressed();
  redraw();
  let width = document.documentElement.clientWidth;
  const resized = () => { if (document.documentElement.clientWidth !== width) { width = document.documentElement.clientWidth; redraw(); } };
  addEventListener("resize", resized);
  addEventListener("beforeprint", redraw);
  return { whenChosen: (act) => { whenChosen = act; for (const view of views) if (view.x === "optimizer step") view.plot.classList.add("chosen"); } };
})();

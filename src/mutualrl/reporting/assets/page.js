"use strict";
// Sorting and filtering of tables, and the browser of rescues. Everything a model wrote is set as text, never as markup.
(() => {
  const compare = (a, b) => {
    const plain = /^[-+]?[0-9][0-9.]*( ± [0-9.]+)?$/;
    return plain.test(a) && plain.test(b) ? Number.parseFloat(a) - Number.parseFloat(b) : a.localeCompare(b, "en", { numeric: true });
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = [...body.rows].sort((r, s) => (up ? 1 : -1) * compare(r.cells[column].textContent, s.cells[column].textContent));
        body.append(...rows);
      });
    });
    if (table.tBodies[0].rows.length < 4) continue;
    const label = document.createElement("label");
    const input = document.createElement("input");
    input.type = "search";
    label.className = "controls";
    label.append("Filter the rows: ", input);
    table.parentElement.before(label);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(words);
    });
  }

  const panel = document.getElementById("rescues");
  if (panel) {
    const chunks = [...document.querySelectorAll("script.rescue-data")];
    const parsed = new Map();
    const chunk = (i) => {
      if (!parsed.has(i)) parsed.set(i, JSON.parse(chunks[i].textContent));
      return parsed.get(i);
    };
    const size = Number(panel.dataset.chunk), total = Number(panel.dataset.total), page = 10;
    const record = (i) => chunk(Math.floor(i / size))[i % size];
    const get = (id) => document.getElementById(id);
    const list = get("rescue-list"), status = get("rescue-status"), search = get("rescue-search");
    const policy = get("rescue-policy"), outcome = get("rescue-outcome"), back = get("rescue-back"), on = get("rescue-on");
    let chosen = null, first = 0; // chosen: the places that pass the filters; null is all of them

    const element = (tag, text, name) => {
      const made = document.createElement(tag);
      if (text !== undefined) made.textContent = text;
      if (name) made.className = name;
      return made;
    };
    const entry = (list_, term, ...contents) => {
      const what = element("dd");
      what.append(...contents);
      list_.append(element("dt", term), what);
    };
    const text = (value, name) => element("div", value === "" ? "(nothing)" : value, "text" + (name ? " " + name : ""));

    // Two texts as [piece, whether it differs]: words that are not in their longest common subsequence. A text has at
    // most 4,000 characters here.
    const differences = (one, other) => {
      const [all, every] = [one, other].map((value) => value.split(/(\s+)/).filter((piece) => piece !== ""));
      const isWord = (piece) => piece.trim() !== "";
      const [a, b] = [all.filter(isWord), every.filter(isWord)];
      let start = 0, end = 0;
      while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
      while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
      const [rows, columns] = [a.length - start - end, b.length - start - end];
      const common = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
      for (let i = rows - 1; i >= 0; i--)
        for (let j = columns - 1; j >= 0; j--)
          common[i][j] = a[start + i] === b[start + j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
      const [left, right] = [a.map(() => false), b.map(() => false)];
      let i = 0, j = 0;
      while (i < rows || j < columns) {
        if (i < rows && j < columns && a[start + i] === b[start + j]) i++, j++;
        else if (j === columns || (i < rows && common[i + 1][j] >= common[i][j + 1])) left[start + i++] = true;
        else right[start + j++] = true;
      }
      const pieces = (texts, differ) => {
        let word = 0;
        return texts.map((piece) => [piece, isWord(piece) && differ[word++]]);
      };
      return [pieces(all, left), pieces(every, right)];
    };
    const marked = (words, name) => {
      const box = element("div", undefined, "text " + name);
      for (const [piece, differs] of words) box.append(differs ? element("mark", piece) : piece);
      return box;
    };

    const shown = (rescue) => {
      const box = element("article", undefined, "rescue");
      box.append(element("h3", `${rescue.policy}, step ${rescue.step}, learnt from ${rescue.peer}` + (panel.dataset.several ? ` (${rescue.run})` : "")));
      box.append(text(rescue.prompt, "prompt"));
      const [first, ...others] = rescue.own;
      const both = first && first[0] !== "" && rescue.answer !== "";
      const [left, right] = both ? differences(first[0], rescue.answer) : [];
      const kind = ([, reward]) => (reward > 0 ? "good" : "bad");
      const own = element("div"), peer = element("div"), pair = element("div", undefined, "pair");
      own.append(element("h4", `Own answers (${rescue.own.length})`));
      if (first) own.append(left ? marked(left, kind(first)) : text(first[0], kind(first)));
      own.append(...others.map((each) => text(each[0], kind(each))));
      peer.append(element("h4", rescue.peer === "(gold)" ? "The data's solution" : `${rescue.peer}'s success`));
      peer.append(right ? marked(right, "good") : text(rescue.answer, "good"));
      pair.append(own, peer);
      box.append(pair);
      const parts = element("dl");
      if (rescue.later === "unknown") entry(parts, "Asked again", "not known: rounds are missing from the exchange");
      else if (rescue.later === null) entry(parts, "Asked again", "not so far");
      else {
        const [round, correct, of, words] = rescue.later;
        const answers = [element("div", `in round ${round}: ${correct} of ${of} correct`, correct ? "good" : "bad")];
        if (words !== null) answers.push(text(words, "good"));
        entry(parts, "Asked again", ...answers);
      }
      box.append(parts);
      return box;
    };
    const render = () => {
      const count = chosen ? chosen.length : total;
      const last = Math.min(first + page, count);
      const boxes = [];
      for (let i = first; i < last; i++) boxes.push(shown(record(chosen ? chosen[i] : i)));
      list.replaceChildren(...boxes);
      status.textContent = count ? `${first + 1} to ${last} of ${count} rescues` : "No rescue passes these filters";
      back.disabled = first === 0;
      on.disabled = last >= count;
    };
    const filter = () => {
      const words = search.value.toLowerCase(), who = policy.value, how = outcome.value;
      first = 0;
      chosen = null;
      if (words || who || how) {
        chosen = [];
        for (let i = 0; i < total; i++) {
          const rescue = record(i);
          if (who && rescue.policy !== who) continue;
          const asked = Array.isArray(rescue.later), solved = asked && rescue.later[1] > 0;
          if (how === "solved" ? !solved : how === "unsolved" ? solved || !asked : how === "never" && rescue.later !== null) continue;
          if (words && !(rescue.prompt + "\n" + rescue.answer).toLowerCase().includes(words)) continue;
          chosen.push(i);
        }
      }
      render();
    };
    search.addEventListener("input", filter);
    policy.addEventListener("change", filter);
    outcome.addEventListener("change", filter);
    back.addEventListener("click", () => { first = Math.max(0, first - page); render(); });
    on.addEventListener("click", () => { first += page; render(); });
    render();
  }
  document.documentElement.dataset.ready = Math.round(performance.now());
})();

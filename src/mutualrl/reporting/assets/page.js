"use strict";
// Table sorting and filtering, and the rescue browser. Model output is inserted as text, never as markup.
(() => {
  const compare = (a, b) => {
    const numeric = /^[-+]?[0-9][0-9.]*( ± [0-9.]+)?$/;
    return numeric.test(a) && numeric.test(b) ? Number.parseFloat(a) - Number.parseFloat(b) : a.localeCompare(b, "en", { numeric: true });
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const ascending = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = [...body.rows].sort((r, s) => (ascending ? 1 : -1) * compare(r.cells[column].textContent, s.cells[column].textContent));
        body.append(...rows);
      });
    });
    if (table.tBodies[0].rows.length < 4) continue;
    const label = document.createElement("label");
    const input = document.createElement("input");
    input.type = "search";
    label.className = "controls";
    label.append("Filter rows: ", input);
    table.parentElement.before(label);
    input.addEventListener("input", () => {
      const query = input.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(query);
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
    const policy = get("rescue-policy"), outcome = get("rescue-outcome"), previous = get("rescue-back"), next = get("rescue-on");
    let matches = null, first = 0; // matches: indices that pass the filters; null means all

    const element = (tag, text, name) => {
      const node = document.createElement(tag);
      if (text !== undefined) node.textContent = text;
      if (name) node.className = name;
      return node;
    };
    const entry = (list_, term, ...contents) => {
      const definition = element("dd");
      definition.append(...contents);
      list_.append(element("dt", term), definition);
    };
    const text = (value, name) => element("div", value === "" ? "(empty)" : value, "text" + (name ? " " + name : ""));

    // Return two texts as lists of [piece, differs]: a word differs if it is not in their longest common subsequence.
    // Texts have at most 4,000 characters.
    const differences = (one, other) => {
      const [ownPieces, peerPieces] = [one, other].map((value) => value.split(/(\s+)/).filter((piece) => piece !== ""));
      const isWord = (piece) => piece.trim() !== "";
      const [a, b] = [ownPieces.filter(isWord), peerPieces.filter(isWord)];
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
      return [pieces(ownPieces, left), pieces(peerPieces, right)];
    };
    const marked = (pieces, name) => {
      const box = element("div", undefined, "text " + name);
      for (const [piece, differs] of pieces) box.append(differs ? element("mark", piece) : piece);
      return box;
    };

    const shown = (rescue) => {
      const box = element("article", undefined, "rescue");
      box.append(element("h3", `${rescue.policy}, step ${rescue.step}, learned from ${rescue.peer}` + (panel.dataset.several ? ` (${rescue.run})` : "")));
      box.append(text(rescue.prompt, "prompt"));
      const [first, ...others] = rescue.own;
      const both = first && first[0] !== "" && rescue.answer !== "";
      const [left, right] = both && !rescue.hint ? differences(first[0], rescue.answer) : [];
      const [hint, written] = rescue.hint ? differences(rescue.hint, rescue.answer) : [];
      const kind = ([, reward]) => (reward > 0 ? "good" : "bad");
      const own = element("div"), peer = element("div"), words = element("div");
      const pair = element("div", undefined, rescue.hint ? "pair three" : "pair");
      own.append(element("h4", `Own answers (${rescue.own.length})`));
      if (first) own.append(left ? marked(left, kind(first)) : text(first[0], kind(first)));
      own.append(...others.map((rollout) => text(rollout[0], kind(rollout))));
      peer.append(element("h4", rescue.peer === "(gold)" ? "The data's solution" : `${rescue.peer}'s success${rescue.hint ? ", shown as a hint" : ""}`));
      if (rescue.hint) {
        peer.append(marked(hint, "good"));
        words.append(element("h4", "Own answer to the hint, confirmed"), marked(written, "good"));
        pair.append(own, peer, words);
      } else {
        peer.append(right ? marked(right, "good") : text(rescue.answer, "good"));
        pair.append(own, peer);
      }
      box.append(pair);
      const parts = element("dl");
      if (rescue.later === "unknown") entry(parts, "Next visit", "unknown: rounds are missing from the exchange");
      else if (rescue.later === null) entry(parts, "Next visit", "none yet");
      else {
        const { round, correct, of, text: answer } = rescue.later;
        const answers = [element("div", `in round ${round}: ${correct} of ${of} correct`, correct ? "good" : "bad")];
        if (answer !== null) answers.push(text(answer));
        entry(parts, "Next visit", ...answers);
      }
      if (rescue.visits.length > 1) entry(parts, "All later visits", element("div", rescue.visits.map(([k, n]) => `${k}/${n}`).join("  "), "fractions"));
      box.append(parts);
      return box;
    };
    const render = () => {
      const count = matches ? matches.length : total;
      const last = Math.min(first + page, count);
      const boxes = [];
      for (let i = first; i < last; i++) boxes.push(shown(record(matches ? matches[i] : i)));
      list.replaceChildren(...boxes);
      status.textContent = count ? `${first + 1} to ${last} of ${count} rescues` : "No rescues match these filters";
      previous.disabled = first === 0;
      next.disabled = last >= count;
    };
    const filter = () => {
      const query = search.value.toLowerCase(), name = policy.value, wanted = outcome.value;
      first = 0;
      matches = null;
      if (query || name || wanted) {
        matches = [];
        for (let i = 0; i < total; i++) {
          const rescue = record(i);
          if (name && rescue.policy !== name) continue;
          const answered = rescue.later !== null && rescue.later !== "unknown", solved = answered && rescue.later.correct > 0;
          if (wanted === "solved" && !solved) continue;
          if (wanted === "unsolved" && (solved || !answered)) continue;
          if (wanted === "never" && rescue.later !== null) continue;
          if (query && !(rescue.prompt + "\n" + rescue.answer + "\n" + rescue.hint).toLowerCase().includes(query)) continue;
          matches.push(i);
        }
      }
      render();
    };
    search.addEventListener("input", filter);
    policy.addEventListener("change", filter);
    outcome.addEventListener("change", filter);
    previous.addEventListener("click", () => { first = Math.max(0, first - page); render(); });
    next.addEventListener("click", () => { first += page; render(); });
    render();
  }
  document.documentElement.dataset.ready = Math.round(performance.now());
})();

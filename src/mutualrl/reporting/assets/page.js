// Tables sort by a button in each head and filter by a text field; commands are copied by a button.
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

  for (const button of document.querySelectorAll("button.copy")) {
    const command = button.parentElement.querySelector("code");
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command.textContent);
      } catch { // a page from disk may not write the clipboard itself
        getSelection().selectAllChildren(command);
        if (!document.execCommand("copy")) return;
      }
      button.firstChild.textContent = "Copied";
      setTimeout(() => { button.firstChild.textContent = "Copy"; }, 2000);
    });
  }
  document.documentElement.dataset.ready = Math.round(performance.now());
})();

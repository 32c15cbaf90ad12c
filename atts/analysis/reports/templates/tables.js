"use strict";
(() => {
  // Tables: a click, or Enter on the column's button, sorts; again turns it round.
  const key = (row, place) => {
    const cell = row.cells[place];
    return cell.dataset.v !== undefined ? Number(cell.dataset.v) : cell.textContent.trim().toLowerCase();
  };
  const order = (a, b) =>
    typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
  document.addEventListener("click", (event) => {
    const head = event.target.closest("th button") && event.target.closest("th");
    if (!head) return;
    const table = head.closest("table"), body = table.tBodies[0], place = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].map((row) => [key(row, place), row]);
    rows.sort((a, b) => (down ? -1 : 1) * order(a[0], b[0]));
    body.append(...rows.map((pair) => pair[1]));
  });
})();

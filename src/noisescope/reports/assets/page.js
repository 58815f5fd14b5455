"use strict";
// What the page can do beyond being read: themes, sorting, filters, tooltips, copying, the keyboard.
// Texts go through textContent only: nothing from the report ever becomes markup.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const onEdit = (field, apply) => { for (const event of ["input", "change"]) field.addEventListener(event, apply); };
  const valueOf = (cell) => (cell.dataset.value === undefined ? null : Number(cell.dataset.value));

  for (const element of all(".controls, .theme, .copy")) element.hidden = false;

  // -- theme
  const root = document.documentElement;
  const button = document.querySelector(".theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const nameTheme = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  nameTheme();

  // -- contents: the section in view
  const sections = all("main > section");
  const links = all("nav a");
  const inView = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) inView[entry.isIntersecting ? "add" : "delete"](entry.target);
    const current = sections.findIndex((section) => inView.has(section));
    links.forEach((link, index) => {
      if (index === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
  }, { rootMargin: "0px 0px -60% 0px" });
  for (const section of sections) watcher.observe(section);

  // -- tables: numbers by value, then words; what is empty stays last in both directions
  const words = new Intl.Collator("en", { numeric: true });
  const rank = (cell) => (valueOf(cell) !== null ? 0 : cell.textContent.trim() ? 1 : 2);
  const compare = (a, b, direction) => {
    if (rank(a) !== rank(b)) return rank(a) - rank(b);
    if (rank(a) === 0) return direction * (valueOf(a) - valueOf(b));
    return direction * words.compare(a.textContent, b.textContent);
  };
  for (const box of all(".table")) {
    const body = box.querySelector("tbody");
    const rows = [...body.rows];
    const heads = all("thead th", box);
    const next = { none: "ascending", ascending: "descending", descending: "none" };
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return; // a button needs a name
      const control = document.createElement("button");
      control.type = "button";
      control.textContent = head.textContent;
      head.replaceChildren(control);
      head.setAttribute("aria-sort", "none");
      control.addEventListener("click", () => {
        const order = next[head.getAttribute("aria-sort")];
        for (const other of all("[aria-sort]", box)) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", order);
        const direction = order === "descending" ? -1 : 1;
        const sorted = [...rows];
        if (order !== "none") sorted.sort((a, b) => compare(a.cells[column], b.cells[column], direction));
        body.append(...sorted);
      });
    });
    const filter = box.querySelector("input");
    if (!filter) continue;
    const apply = () => {
      const wanted = filter.value.trim().toLowerCase();
      for (const row of rows) {
        row.hidden = ![...row.cells].some((cell) => cell.textContent.toLowerCase().includes(wanted));
      }
      box.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
    };
    onEdit(filter, apply);
    apply();
  }
  // A box that does not scroll needs no stop of the tab key.
  const trimStops = () => {
    for (const box of all(".table .scroll")) {
      const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
      box.tabIndex = scrolls ? 0 : -1;
    }
  };
  addEventListener("resize", trimStops);
  document.addEventListener("toggle", trimStops, true); // a box that is folded away has no size
  trimStops();

  // -- tooltips: from title, which serves without this script; spoken when the keyboard moves
  const tip = document.getElementById("tip-of-page");
  const status = document.getElementById("status-of-page");
  const lines = new Map();
  for (const element of all(".heat td[title], .shape")) {
    const title = element.querySelector("title");
    lines.set(element, (title ? title.textContent : element.title).split("\n"));
    if (title) title.remove();
    element.removeAttribute("title");
  }
  let shown = null;
  const place = () => {
    if (!shown) return;
    const near = (shown.querySelector(".hit") || shown).getBoundingClientRect();
    const size = tip.getBoundingClientRect();
    const middle = near.left + near.width / 2 - size.width / 2;
    const above = near.top - size.height - 8;
    const below = near.bottom + 8;
    const isBar = shown.querySelector("rect.hit") !== null; // above a bar stand its mark and its neighbours' marks
    const goesBelow = above < 4 || (isBar && below + size.height < innerHeight);
    tip.style.left = `${Math.max(4, Math.min(middle, root.clientWidth - size.width - 4))}px`;
    tip.style.top = `${goesBelow ? below : above}px`;
  };
  const show = (element) => {
    shown = element;
    tip.hidden = !element;
    if (!element) return;
    tip.replaceChildren(...lines.get(element).map((line, index) => {
      const part = document.createElement(index ? "span" : "strong");
      part.textContent = line;
      return part;
    }));
    place();
  };
  const described = (event) => {
    const element = event.target.closest?.("td, .shape");
    return lines.has(element) ? element : null;
  };
  document.addEventListener("pointerover", (event) => show(described(event)));
  document.documentElement.addEventListener("pointerleave", () => show(null));
  document.addEventListener("focusin", (event) => {
    const element = described(event);
    show(element);
    status.textContent = element ? lines.get(element).join("; ") : "";
  });
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("scroll", place, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") show(null); });

  // -- arrow keys: a grid (or a chart, a grid of one row) is one stop of the tab key
  const moves = {
    ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity],
  };
  const clamp = (at, length) => Math.max(0, Math.min(at, length - 1));
  const roam = (box, grid) => {
    const enter = (wanted) => {
      for (const cell of grid().flat()) cell.setAttribute("tabindex", cell === wanted ? "0" : "-1");
    };
    box.addEventListener("keydown", (event) => {
      const move = moves[event.key];
      const cells = grid();
      const row = cells.findIndex((line) => line.includes(event.target));
      if (!move || row < 0) return;
      event.preventDefault();
      const down = event.ctrlKey && !move[0] ? move[1] : move[0]; // Ctrl+Home and Ctrl+End go to the corners
      const line = cells[clamp(row + down, cells.length)];
      line[clamp(cells[row].indexOf(event.target) + move[1], line.length)].focus();
    });
    box.addEventListener("focusin", (event) => { if (lines.has(event.target)) enter(event.target); });
    return enter;
  };
  for (const chart of all(".chart")) {
    const grid = Object.values(Object.groupBy(all(".shape", chart), (shape) => shape.dataset.row));
    const enter = roam(chart, () => grid);
    if (grid.length) enter(grid[0][0]);
  }

  // -- commands: copied, or selected where the clipboard is closed to a page from a file
  for (const copy of all(".copy")) {
    const code = copy.parentElement.querySelector("code");
    copy.setAttribute("aria-label", `Copy: ${code.textContent}`);
    copy.addEventListener("click", async () => {
      let word = "Copied";
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        getSelection().selectAllChildren(code);
        if (!document.execCommand("copy")) word = "Selected";
      }
      copy.textContent = word;
      status.textContent = word;
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
  }

  // -- what is folded opens for print, and for a link or a search that leads into it
  const folded = all("details");
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = folded.filter((box) => !box.open);
    for (const box of opened) box.open = true;
  });
  addEventListener("afterprint", () => { for (const box of opened) box.open = false; });

  // -- heat map
  for (const heat of all(".heat")) {
    const form = heat.querySelector("form");
    const body = heat.querySelector("tbody");
    const rows = [...body.rows];
    const columns = all("thead th", heat);
    const cellsOf = (row) => all("td", row);
    const sites = all("td:not(.none)", body).length;
    const visible = () => [...body.rows].filter((row) => !row.hidden).map((row) => cellsOf(row).filter((c) => !c.hidden));
    const enter = roam(heat, visible);
    const apply = () => {
      const { sort, column, least, starred } = form.elements;
      const wanted = (index) => column.value === "" || Number(column.value) === index;
      const limit = least.value === "" ? -Infinity : Number(least.value);
      const matches = (cell, index) => wanted(index) && !cell.classList.contains("none")
        && (limit === -Infinity || (valueOf(cell) !== null && valueOf(cell) >= limit))
        && (!starred?.checked || cell.dataset.starred !== undefined);
      const filtered = column.value !== "" || limit !== -Infinity || Boolean(starred?.checked);
      let kept = 0;
      columns.forEach((head, index) => { head.hidden = !wanted(index); });
      for (const row of rows) {
        let found = false;
        cellsOf(row).forEach((cell, index) => {
          const match = matches(cell, index);
          cell.hidden = !wanted(index);
          cell.classList.toggle("off", !match);
          found ||= match;
          kept += match;
        });
        row.hidden = filtered && !found;
      }
      const key = (row) => {
        const cells = sort.value === "largest" ? cellsOf(row) : [cellsOf(row)[Number(sort.value)]];
        return Math.max(...cells.map((cell) => valueOf(cell) ?? -Infinity));
      };
      const difference = (a, b) => (key(a) === key(b) ? 0 : key(b) - key(a));
      body.append(...(sort.value === "" ? rows : [...rows].sort(difference)));
      form.querySelector("output").textContent = filtered ? `${kept} of ${sites} cells` : "";
      show(null);
      const first = visible()[0]?.[0];
      if (first) enter(first);
    };
    onEdit(form, apply);
    form.addEventListener("reset", () => setTimeout(apply)); // the fields change after this event
    form.addEventListener("submit", (event) => event.preventDefault());
    apply();
  }
})();

// The call tree and the details of the chosen record. Only the rows in sight are elements.

const ROW_HEIGHT = 26;
const ROWS_AROUND = 8;
const DEEPEST_INDENT = 24;

// An element. Whatever a trace says becomes text of an element, and never markup.
function make(tag, className = "", text = null) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== null) element.textContent = text;
  return element;
}

function byId(id) { return document.getElementById(id); }

function phaseClass(phase) { return PHASES.includes(phase) ? phase : "outside"; }

class TreePane {
  constructor(trace, view) {
    this.trace = trace;
    this.view = view;
    this.chosen = -1;
    this.box = byId("tree");
    this.space = byId("space");
    this.box.addEventListener("scroll", () => this.draw());
    this.box.addEventListener("keydown", (event) => this.#onKey(event));
    this.space.addEventListener("click", (event) => this.#onClick(event));
    this.space.addEventListener("dblclick", (event) => this.#onDoubleClick(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
    view.onRows.push(() => this.#onRows());
    this.#onRows();
  }

  #onRows() {
    const rows = this.view.rows.length + (this.view.hidden ? 1 : 0);
    this.space.style.height = `${rows * ROW_HEIGHT}px`;
    this.box.style.height = `${Math.min(Math.max(rows, 6), 22) * ROW_HEIGHT}px`;
    this.most = 1;
    for (let i = 0; i < this.trace.length; i = this.trace.after[i]) {
      this.most = Math.max(this.most, this.view.bytes[i]);
    }
    this.draw();
  }

  draw() {
    const { rows, hidden } = this.view;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW_HEIGHT) - ROWS_AROUND);
    const last = Math.min(rows.length, Math.ceil(
      (this.box.scrollTop + this.box.clientHeight) / ROW_HEIGHT) + ROWS_AROUND);
    const lines = [];
    for (let k = first; k < last; k++) lines.push(this.#row(rows[k], k));
    if (hidden && last === rows.length) {
      const rest = make("div", "rest", `${countText(hidden)} more rows: search, filter or fold`);
      rest.style.top = `${rows.length * ROW_HEIGHT}px`;
      lines.push(rest);
    }
    if (!rows.length) lines.push(make("div", "rest", this.#emptyText()));
    this.space.replaceChildren(...lines);
    const chosen = this.view.rowOf(this.chosen);
    if (chosen >= first && chosen < last) this.box.setAttribute("aria-activedescendant", `row-${this.chosen}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  #emptyText() {
    return this.trace.length ? "Nothing matches the search and the filters."
      : "Nothing was recorded.";
  }

  #row(i, k) {
    const { trace, view } = this;
    const facts = trace.of(i);
    const kind = KINDS.includes(facts.type) ? facts.type : "other";
    const row = make("div", `row ${kind}`);
    row.id = `row-${i}`;
    row.dataset.record = i;
    row.style.top = `${k * ROW_HEIGHT}px`;
    row.setAttribute("role", "treeitem");
    row.setAttribute("aria-level", trace.depth[i] + 1);
    row.setAttribute("aria-selected", i === this.chosen);
    const fold = make("span", "fold");
    if (trace.hasChildren(i)) {
      row.setAttribute("aria-expanded", view.unfolded[i] === 1);
      fold.textContent = view.unfolded[i] ? "\u25bc" : "\u25b6";
    }
    const name = make("span", "name");
    name.style.paddingLeft = `${Math.min(trace.depth[i], DEEPEST_INDENT) * 16}px`;
    name.append(fold, make("span", `dot ${kind === "collective" ? phaseClass(facts.phase) : kind}`),
      make("span", "what", trace.name(i)));
    if (facts.fallback) name.append(make("span", "tag", "fallback"));
    name.append(make("span", "more", moreOf(facts)));
    name.title = `${trace.name(i)}  ${moreOf(facts)}`;

    const bytes = make("span", "bytes num");
    if (view.calls[i]) {
      const line = make("span", "line");
      const part = make("i");
      part.style.width = `${100 * view.bytes[i] / this.most}%`;
      line.append(part);
      bytes.append(line, make("span", "", bytesText(view.bytes[i])));
      bytes.title = `${countText(view.bytes[i])} bytes`;
    }
    row.append(name, make("span", "phase", facts.phase ?? ""), make("span", "axis", facts.axis ?? ""),
      make("span", "calls num", view.calls[i] ? countText(view.calls[i]) : ""), bytes,
      make("span", "time num", timeText(trace.duration[i])));
    return row;
  }

  choose(i) {
    this.chosen = i;
    const top = this.view.rowOf(i) * ROW_HEIGHT;
    const { scrollTop, clientHeight } = this.box;
    if (top < scrollTop) this.box.scrollTop = top;
    else if (top + ROW_HEIGHT > scrollTop + clientHeight) {
      this.box.scrollTop = top + ROW_HEIGHT - clientHeight;
    }
    this.draw();
    showDetails(this.trace, this.view, i);
  }

  #recordAt(event) {
    const row = event.target.closest(".row");
    return row === null ? -1 : Number(row.dataset.record);
  }

  #onClick(event) {
    const i = this.#recordAt(event);
    if (i < 0) return;
    this.box.focus({ preventScroll: true });
    if (event.target.classList.contains("fold")) this.#turn(i, !this.view.unfolded[i]);
    this.choose(i);
  }

  #onDoubleClick(event) {
    const i = this.#recordAt(event);
    if (i >= 0 && !event.target.classList.contains("fold")) this.#turn(i, !this.view.unfolded[i]);
  }

  #turn(i, unfold) {
    if (this.trace.hasChildren(i)) this.view.setFold(i, unfold);
  }

  #onKey(event) {
    const { trace, view } = this;
    if (event.ctrlKey || event.metaKey || event.altKey || !view.rows.length) return;
    const row = view.rowOf(this.chosen);
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW_HEIGHT) - 1);
    const go = (k) => this.choose(view.rows[Math.min(Math.max(k, 0), view.rows.length - 1)]);
    const open = row >= 0 && trace.hasChildren(this.chosen) && view.unfolded[this.chosen];
    switch (event.key) {
      case "ArrowDown": go(row + 1); break;
      case "ArrowUp": go(row - 1); break;
      case "PageDown": go(row + page); break;
      case "PageUp": go(row - page); break;
      case "Home": go(0); break;
      case "End": go(view.rows.length - 1); break;
      case "ArrowRight":
        if (row < 0) go(0);
        else if (open) go(row + 1);
        else this.#turn(this.chosen, true);
        break;
      case "ArrowLeft":
        if (open) this.#turn(this.chosen, false);
        else if (row >= 0 && trace.parent[this.chosen] !== NO_PARENT) this.choose(trace.parent[this.chosen]);
        break;
      case "Enter": case " ":
        if (row >= 0) this.#turn(this.chosen, !view.unfolded[this.chosen]);
        break;
      default: return;
    }
    event.preventDefault();
  }
}

// All that is known of a record, as a list of names and values.
function showDetails(trace, view, i) {
  const list = make("dl");
  const add = (name, value) => list.append(make("dt", "", name), make("dd", "", value));
  const path = [];
  for (let up = trace.parent[i]; up !== NO_PARENT; up = trace.parent[up]) path.unshift(trace.name(up));
  if (path.length) add("inside", path.join(" \u203a "));
  for (const [name, value] of Object.entries(trace.of(i))) {
    if (value !== null && value !== "" && name !== "event_type") add(name.replaceAll("_", " "), factText(name, value));
  }
  if (trace.hasChildren(i)) {
    add("collectives inside", countText(view.calls[i]));
    add("bytes inside", countText(view.bytes[i]));
  }
  add("begins", timeText(trace.start[i]));
  add("takes", timeText(trace.duration[i]));
  byId("details-title").textContent = trace.name(i);
  byId("details").replaceChildren(list);
}

function factText(name, value) {
  if (Array.isArray(value)) {
    if (value.some((one) => one !== null && typeof one === "object")) {
      return value.map((one) => (one?.shape ? tensorText(one) : factText(name, one))).join("\n");
    }
    return value.length > 64 ? `[${value.slice(0, 64).join(", ")}, \u2026 ${value.length} in all]`
      : `[${value.join(", ")}]`;
  }
  if (value !== null && typeof value === "object") return JSON.stringify(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return name.endsWith("bytes") ? countText(value) : String(value);
}

function tensorText(info) {
  const layout = info.is_dtensor ? ` ${layoutText(info.placements)}` : " plain";
  return `${shapeText(info.shape)} ${shortDtype(info.dtype)}${layout}`;
}

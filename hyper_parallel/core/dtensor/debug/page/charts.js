// The heading, the filters, the bars and the table of parameters.
//
// Bars and filters are of the trace's summary, which counts what max_records dropped as well.

const PARAMETERS_AT_ONCE = 200;
const BARS_AT_MOST = 200;

function nameOfValue(key, value) {
  if (value === null || value === undefined) return "none";
  return key === "type" ? shortType(value) : String(value);
}

function showHeading(trace) {
  const { data } = trace;
  const of = `Rank ${data.rank} of ${data.world_size}`;
  byId("whose").textContent = of;
  document.title = `Communication trace, ${of.toLowerCase()}`;
  const wire = data.summary.reduce((sum, row) => sum + row.wire_bytes, 0);
  let end = 0;
  for (let i = 0; i < trace.length; i++) end = Math.max(end, trace.start[i] + trace.duration[i]);
  const add = (name, value, title, id) => {
    const box = make("div");
    box.title = title;
    const text = make("dd", "", value);
    text.id = id;
    box.append(make("dt", "", name), text);
    byId("facts").append(box);
  };
  add("Collectives", countText(data.total_counts), "Collectives of this rank", "total-count");
  add("Sent", bytesText(wire), `${countText(wire)} bytes on the wire, ring algorithm`, "total-bytes");
  add("Records", countText(trace.length), "Records in the tree", "total-records");
  add("Time", timeText(end), "From the first record to the end of the last", "total-time");
  if (data.incomplete !== null) {
    byId("notices").append(make("p", "notice bad",
      `This trace is incomplete. Recording failed: ${data.incomplete}`));
  }
  if (data.dropped_records) {
    byId("notices").append(make("p", "notice some",
      `${countText(data.dropped_records)} records were dropped, since max_records was reached. `
      + "Counts, bytes and bars include them; the tree and the timeline do not."));
  }
}

// The summary's rows as groups of one key, the most bytes first, each with its parts by phase.
function grouped(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const value = row[key] ?? null;
    if (!groups.has(value)) groups.set(value, { value, count: 0, bytes: 0, phases: new Map() });
    const group = groups.get(value);
    group.count += row.count;
    group.bytes += row.wire_bytes;
    group.phases.set(row.phase, (group.phases.get(row.phase) ?? 0) + row.wire_bytes);
  }
  return [...groups.values()].sort((a, b) => b.bytes - a.bytes || b.count - a.count);
}

class Filters {
  constructor(trace, view) {
    this.view = view;
    this.chips = [];
    const place = (value) => (PHASES.indexOf(value) + PHASES.length + 1) % (PHASES.length + 1);
    for (const filter of FILTERS) {
      const groups = grouped(trace.data.summary, filter);
      if (filter === "phase") groups.sort((a, b) => place(a.value) - place(b.value));
      if (!groups.length) continue;
      const box = make("div", "group");
      box.append(make("span", "", filter === "type" ? "Collective" : filter[0].toUpperCase() + filter.slice(1)));
      for (const { value, count } of groups) box.append(this.#chip(filter, value, count));
      byId("chips").append(box);
    }
    view.onNarrow.push(() => this.#show());
    this.#show();
  }

  #chip(filter, value, count) {
    const chip = make("button", "chip");
    chip.dataset.filter = filter;
    chip.dataset.value = nameOfValue(filter, value);
    chip.title = value === null ? "none" : String(value);
    if (filter === "phase") chip.append(make("span", `dot ${phaseClass(value)}`));
    chip.append(make("b", "", nameOfValue(filter, value)), make("i", "", countText(count)));
    chip.addEventListener("click", () => this.view.toggle(filter, value));
    this.chips.push({ chip, filter, value });
    return chip;
  }

  #show() {
    const { view } = this;
    for (const { chip, filter, value } of this.chips) {
      chip.setAttribute("aria-pressed", view.chosen[filter].has(value));
    }
    byId("matches").textContent = view.narrowed
      ? `${countText(view.records)} of ${countText(view.trace.length)} records` : "";
    if (byId("search").value !== view.query) byId("search").value = view.query;
  }
}

// A chart of bytes by one key. A click on a bar filters by it; by a module, it searches for it.
class Bars {
  constructor(trace, view, key) {
    this.trace = trace;
    this.view = view;
    this.key = key;
    this.box = byId(`by-${key}`);
    this.state = null;
    view.onNarrow.push(() => this.#show());
    this.#show();
  }

  #show() {
    // A search changes nothing here.
    const state = JSON.stringify(FILTERS.map((name) => [...this.view.chosen[name]]));
    if (state === this.state) return;
    this.state = state;
    const rows = this.trace.data.summary.filter((row) => this.view.passes(row));
    const groups = grouped(rows, this.key);
    const most = Math.max(1, ...groups.slice(0, 1).map((group) => group.bytes));
    const bars = groups.slice(0, BARS_AT_MOST).map((group) => this.#bar(group, most));
    if (groups.length > BARS_AT_MOST) {
      bars.push(make("p", "muted", `and ${countText(groups.length - BARS_AT_MOST)} more`));
    }
    if (!groups.length) bars.push(make("p", "muted", "No collective."));
    this.box.replaceChildren(...bars);
  }

  #bar({ value, count, bytes, phases }, most) {
    const name = nameOfValue(this.key, value);
    const bar = make("button", "bar");
    bar.dataset.value = name;
    bar.title = `${name}: ${countText(bytes)} bytes in ${countText(count)} calls\n`
      + [...phases].map(([phase, part]) => `${phase}: ${countText(part)} bytes`).join("\n");
    const line = make("span", "line");
    for (const phase of [...PHASES, ...[...phases.keys()].filter((one) => !PHASES.includes(one))]) {
      if (!phases.get(phase)) continue;
      const part = make("span", phaseClass(phase));
      part.style.width = `${100 * phases.get(phase) / most}%`;
      line.append(part);
    }
    bar.append(make("span", value === null ? "label none" : "label", name), line,
      make("span", "num", bytesText(bytes)), make("span", "num muted", `${countText(count)}\u00d7`));
    bar.addEventListener("click", () => {
      if (this.key !== "module") this.view.toggle(this.key, value);
      else if (value !== null) this.view.search(this.view.query === value ? "" : value);
    });
    return bar;
  }
}

class Parameters {
  constructor(trace) {
    this.all = Object.entries(trace.data.parameters);
    this.limit = PARAMETERS_AT_ONCE;
    byId("parameter-search").addEventListener("input", () => {
      this.limit = PARAMETERS_AT_ONCE;
      this.#show();
    });
    byId("more-parameters").addEventListener("click", () => {
      this.limit += PARAMETERS_AT_ONCE;
      this.#show();
    });
    this.#show();
  }

  #show() {
    const wanted = byId("parameter-search").value.trim().toLowerCase();
    const found = this.all.filter(([name]) => name.toLowerCase().includes(wanted));
    const rows = found.slice(0, this.limit).map(([name, info]) => {
      const row = make("tr");
      const cell = (className, text) => row.append(make("td", className, text));
      cell("mono", name);
      cell("num", shapeText(info.shape));
      cell("num", countText(info.shape.reduce((product, size) => product * size, 1)));
      cell("", shortDtype(info.dtype));
      cell("mono", info.is_dtensor ? layoutText(info.placements) : "plain tensor");
      cell("num", info.mesh_shape ? info.mesh_shape.join(" \u00d7 ") : "");
      cell("", info.requires_grad ? "yes" : "no");
      return row;
    });
    byId("parameters").tBodies[0].replaceChildren(...rows);
    byId("parameters").hidden = !this.all.length;
    byId("more-parameters").hidden = found.length <= this.limit;
    byId("parameter-count").textContent = this.all.length
      ? `${countText(rows.length)} of ${countText(this.all.length)}`
      : "None: the mode was made without a module.";
  }
}

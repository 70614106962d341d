// The trace as the page holds it: one column for each property of the records, which lie in the
// order of the tree, parents before children. What records have in common is kept once, in
// `facts`; everything here is data, and no element of the page is made.

const KINDS = ["module", "op", "redistribute", "collective"];
const PHASES = ["forward", "backward", "recompute", "optimizer", "outside"];
const FILTERS = ["phase", "axis", "type"];
const NO_PARENT = -1;

class Trace {
  constructor(data) {
    this.data = data;
    this.facts = data.facts;
    this.fact = Int32Array.from(data.records.fact);
    this.depth = Int32Array.from(data.records.depth);
    this.start = Float64Array.from(data.records.start);
    this.duration = Float64Array.from(data.records.duration);
    this.length = this.fact.length;
    this.parent = new Int32Array(this.length).fill(NO_PARENT);
    this.after = new Int32Array(this.length); // the first record behind a record's own tree
    this.#connect();
    this.kindOfFact = this.facts.map((facts) => facts.type);
    this.names = this.facts.map(nameOf);
    this.texts = null;
  }

  #connect() {
    const open = [];
    for (let i = 0; i < this.length; i++) {
      while (open.length > this.depth[i]) this.after[open.pop()] = i;
      if (open.length) this.parent[i] = open[open.length - 1];
      open.push(i);
    }
    for (const i of open) this.after[i] = this.length;
  }

  of(i) { return this.facts[this.fact[i]]; }
  kind(i) { return this.kindOfFact[this.fact[i]]; }
  name(i) { return this.names[this.fact[i]]; }
  hasChildren(i) { return this.after[i] > i + 1; }

  // For each of the facts, whether one of its values holds the text; null where all are meant.
  search(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return null;
    this.texts ??= this.facts.map((facts, k) => `${this.names[k]}\n${wordsOf(facts)}`.toLowerCase());
    return this.texts.map((words) => words.includes(wanted));
  }
}

function nameOf(facts) {
  switch (facts.type) {
    case "module": return facts.module_fqn;
    case "op": return facts.op_name;
    case "collective": return shortType(facts.collective_type);
    case "redistribute":
      return `${layoutText(facts.src_placements)} \u2192 ${layoutText(facts.dst_placements)}`;
    default: return String(facts.type);
  }
}

function shortType(type) {
  return String(type).replace(/^differentiable_/, "");
}

function layoutText(placements) {
  if (!placements) return "";
  return placements.length === 1 ? placements[0] : `(${placements.join(", ")})`;
}

function wordsOf(value) {
  if (value === null || typeof value === "boolean") return "";
  return typeof value === "object" ? Object.values(value).map(wordsOf).join("\n") : String(value);
}

// What stands behind the name: shapes of an operator, group and type of a collective.
function moreOf(facts) {
  const shapes = (infos) => infos.map((info) => shapeText(info.shape)).join(", ");
  switch (facts.type) {
    case "op": return `${shapes(facts.inputs)} \u2192 ${shapes(facts.outputs) || "raised"}`;
    case "collective": {
      const dtype = facts.input_dtype ? `${shortDtype(facts.input_dtype)} ` : "";
      return `${dtype}${shapeText(facts.input_shape)} \u2192 ${shapeText(facts.output_shape)}, `
        + `${facts.group_size} ranks${facts.reduce_op ? `, ${facts.reduce_op}` : ""}`;
    }
    case "redistribute": {
      const why = facts.implicit
        ? `implicit for ${facts.argument === null ? "" : `argument ${facts.argument} of `}${facts.needed_by}`
        : "explicit";
      return `${shapeText(facts.tensor_shape)}, ${why}`;
    }
    default: return "";
  }
}

function shapeText(shape) { return shape ? `[${shape.join(", ")}]` : "\u2013"; }
function shortDtype(dtype) { return String(dtype).replace(/^torch\./, ""); }
function countText(value) { return Number(value).toLocaleString("en-US"); }

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
}

function timeText(microseconds) {
  if (microseconds < 1000) return `${Math.round(microseconds)} \u00b5s`;
  if (microseconds < 1e6) return `${(microseconds / 1000).toFixed(microseconds < 1e4 ? 2 : 1)} ms`;
  return `${(microseconds / 1e6).toFixed(2)} s`;
}

// What of a trace is to be seen: the filters, the search, and what is unfolded.
//
// A filter and a search narrow the tree to the records that are wanted and what holds them.
// Wanted is a collective that passes the filters, or with no filter any record, that the search
// finds itself or through a record around it.

const UNFOLDED_AT_FIRST = 80; // rows
const MOST_ROWS = 500000; // the height of more rows is more than browsers draw

class View {
  constructor(trace) {
    this.trace = trace;
    this.query = "";
    this.chosen = Object.fromEntries(FILTERS.map((name) => [name, new Set()]));
    this.shown = new Uint8Array(trace.length);
    this.calls = new Float64Array(trace.length); // with what is inside
    this.bytes = new Float64Array(trace.length);
    this.unfolded = new Uint8Array(trace.length);
    this.before = null; // what was unfolded before the view was narrowed
    this.onRows = []; // called when rows come or go
    this.onNarrow = []; // called when the filters or the search change
    this.#unfoldFirst();
    this.update();
  }

  get narrowed() {
    return this.query.trim() !== "" || FILTERS.some((name) => this.chosen[name].size > 0);
  }

  toggle(filter, value) {
    const values = this.chosen[filter];
    if (!values.delete(value)) values.add(value);
    this.update();
  }

  search(query) {
    this.query = query;
    this.update();
  }

  clear() {
    this.query = "";
    for (const name of FILTERS) this.chosen[name].clear();
    this.update();
  }

  passes(row) {
    return FILTERS.every((name) => {
      const values = this.chosen[name];
      return values.size === 0 || values.has(row[name]);
    });
  }

  update() {
    const { trace, shown, calls, bytes } = this;
    const filtered = FILTERS.some((name) => this.chosen[name].size > 0);
    const found = trace.search(this.query);
    const passing = trace.facts.map((facts) => facts.type === "collective" && this.passes(
      { phase: facts.phase, axis: facts.axis, type: facts.collective_type }));
    const inside = new Uint8Array(trace.length); // the search found it or what is around it
    const holds = new Uint8Array(trace.length); // the search or a filter means what is inside it
    shown.fill(0);
    calls.fill(0);
    bytes.fill(0);
    this.records = 0;
    for (let i = 0; i < trace.length; i++) {
      const parent = trace.parent[i];
      const hit = found === null || found[trace.fact[i]];
      inside[i] = hit || (parent !== NO_PARENT && inside[parent]) ? 1 : 0;
      const wanted = inside[i] && (!filtered || passing[trace.fact[i]]);
      if (!wanted) continue;
      shown[i] = 1;
      this.records++;
      if (filtered || (found !== null && hit)) holds[i] = 1;
      const facts = trace.of(i);
      if (facts.type === "collective") {
        calls[i] = 1;
        bytes[i] = facts.wire_bytes;
      }
    }
    const around = new Uint8Array(trace.length);
    for (let i = trace.length - 1; i >= 0; i--) {
      const parent = trace.parent[i];
      if (parent === NO_PARENT) continue;
      shown[parent] |= shown[i];
      around[parent] |= around[i] | holds[i];
      calls[parent] += calls[i];
      bytes[parent] += bytes[i];
    }
    this.#keepFolds(around);
    for (const listener of this.onNarrow) listener();
    this.layOut();
  }

  // A narrowed view unfolds down to what was found; the user's own folding comes back after it.
  #keepFolds(around) {
    if (this.narrowed) {
      this.before ??= this.unfolded;
      this.unfolded = around;
    } else if (this.before !== null) {
      this.unfolded = this.before;
      this.before = null;
    }
  }

  #unfoldFirst() {
    const { depth } = this.trace;
    const ofDepth = [];
    for (const one of depth) ofDepth[one] = (ofDepth[one] ?? 0) + 1;
    let rows = ofDepth[0] ?? 0;
    let level = 0;
    while (level + 1 < ofDepth.length && rows + ofDepth[level + 1] <= UNFOLDED_AT_FIRST) {
      rows += ofDepth[++level];
    }
    for (let i = 0; i < depth.length; i++) this.unfolded[i] = depth[i] < level ? 1 : 0;
  }

  // The records that have a row now, in order.
  layOut() {
    const { trace, shown, unfolded } = this;
    const rows = [];
    this.hidden = 0;
    for (let i = 0; i < trace.length;) {
      if (shown[i]) {
        if (rows.length < MOST_ROWS) rows.push(i);
        else this.hidden++;
      }
      i = shown[i] && unfolded[i] ? i + 1 : trace.after[i];
    }
    this.rows = rows;
    for (const listener of this.onRows) listener();
  }

  setFold(i, unfold) {
    this.unfolded[i] = unfold ? 1 : 0;
    this.layOut();
  }

  setAllFolds(unfold) {
    this.unfolded.fill(unfold ? 1 : 0);
    this.layOut();
  }

  // Makes sure that a record has a row.
  reveal(i) {
    if (!this.shown[i]) this.clear();
    for (let up = this.trace.parent[i]; up !== NO_PARENT; up = this.trace.parent[up]) {
      this.unfolded[up] = 1;
    }
    this.layOut();
  }

  // The position of a record among the rows, which are sorted; -1 where it has none.
  rowOf(i) {
    let low = 0;
    let high = this.rows.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle] === i) return middle;
      if (this.rows[middle] < i) low = middle + 1;
      else high = middle - 1;
    }
    return -1;
  }
}

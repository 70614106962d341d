// The timeline: modules by depth, operators, redistributions and collectives over time.

const TRACK_HEIGHT = 20;
const AXIS_HEIGHT = 22;
const LABEL_WIDTH = 104;
const DEEPEST_MODULES = 8;
const LETTER_WIDTH = 6.4;

class Timeline {
  constructor(trace, view, choose) {
    this.trace = trace;
    this.view = view;
    this.choose = choose;
    this.canvas = byId("timeline");
    this.tip = byId("tip");
    this.#makeTracks();
    this.end = 1;
    for (let i = 0; i < trace.length; i++) this.end = Math.max(this.end, trace.start[i] + trace.duration[i]);
    this.showAll();
    this.#listen();
    view.onNarrow.push(() => this.#later());
  }

  #makeTracks() {
    const { trace } = this;
    const modulesAround = new Int32Array(trace.length);
    this.track = new Int32Array(trace.length);
    let deepest = -1;
    for (let i = 0; i < trace.length; i++) {
      const parent = trace.parent[i];
      if (parent !== NO_PARENT) modulesAround[i] = modulesAround[parent] + (trace.kind(parent) === "module");
      if (trace.kind(i) === "module") deepest = Math.max(deepest, modulesAround[i]);
    }
    const modules = Math.min(deepest + 1, DEEPEST_MODULES);
    const names = Array.from({ length: modules }, (_, depth) => `modules ${depth}`);
    this.names = [...names, "operators", "redistributions", "collectives"];
    const others = { op: modules, redistribute: modules + 1, collective: modules + 2 };
    for (let i = 0; i < trace.length; i++) {
      this.track[i] = others[trace.kind(i)] ?? Math.min(modulesAround[i], Math.max(modules - 1, 0));
    }
    this.canvas.style.height = `${AXIS_HEIGHT + this.names.length * TRACK_HEIGHT + 4}px`;
    this.canvas.setAttribute("aria-label",
      `Timeline of ${countText(trace.length)} records; the call tree holds the same`);
  }

  showAll() {
    this.from = 0;
    this.to = this.end;
    this.#later();
  }

  // Scales the span of time around a place between 0 (left) and 1 (right).
  zoom(factor, place = 0.5) {
    const span = Math.min(Math.max((this.to - this.from) * factor, 1), this.end);
    this.#moveTo(this.from + (this.to - this.from - span) * place, span);
  }

  #moveTo(from, span) {
    this.from = Math.min(Math.max(from, 0), this.end - span);
    this.to = this.from + span;
    this.#later();
  }

  // Many changes make one drawing.
  #later() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.#draw();
    });
  }

  // The page's colours, which depend on light and dark, as the legend has them.
  #colours() {
    const colours = {};
    for (const dot of byId("legend").querySelectorAll(".dot")) {
      colours[dot.dataset.colour] = getComputedStyle(dot).backgroundColor;
    }
    colours.other = colours.module;
    colours.muted = getComputedStyle(byId("whose")).color;
    colours.text = getComputedStyle(document.body).color;
    colours.line = getComputedStyle(this.canvas.closest(".card")).borderTopColor;
    return colours;
  }

  #draw() {
    const { canvas, trace, view } = this;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.textBaseline = "middle";
    pen.font = "11px system-ui, sans-serif";
    const colours = this.#colours();
    const scale = (width - LABEL_WIDTH) / (this.to - this.from);
    this.#drawAxis(pen, colours, width, height, scale);
    pen.save();
    pen.beginPath();
    pen.rect(LABEL_WIDTH, 0, width - LABEL_WIDTH, height);
    pen.clip();
    // Where many short calls share a pixel, one of them is drawn.
    const taken = this.names.map(() => new Uint8Array(Math.max(width, 0) + 2));
    for (let i = 0; i < trace.length; i++) {
      const start = trace.start[i];
      const end = start + trace.duration[i];
      if (end < this.from || start > this.to) continue;
      const left = LABEL_WIDTH + (start - this.from) * scale;
      const wide = Math.max((end - start) * scale, 1.5);
      const track = this.track[i];
      if (wide < 3) {
        const pixel = Math.min(Math.max(Math.round(left), 0), width);
        if (taken[track][pixel]) continue;
        taken[track][pixel] = 1;
      }
      const facts = trace.of(i);
      const top = AXIS_HEIGHT + track * TRACK_HEIGHT + 2;
      pen.globalAlpha = view.shown[i] ? 1 : 0.15;
      pen.fillStyle = facts.type === "collective" ? colours[phaseClass(facts.phase)]
        : colours[facts.type] ?? colours.other;
      pen.fillRect(left, top, wide > 3 ? wide - 0.5 : wide, TRACK_HEIGHT - 4);
      this.#drawName(pen, facts.type === "collective" ? "#ffffff" : colours.text, i, left, wide, top);
    }
    pen.restore();
  }

  #drawName(pen, colour, i, left, wide, top) {
    const from = Math.max(left, LABEL_WIDTH);
    const letters = Math.floor((left + wide - from - 8) / LETTER_WIDTH);
    if (letters < 3) return;
    const name = this.trace.name(i);
    pen.fillStyle = colour;
    pen.fillText(name.length > letters ? `${name.slice(0, letters - 1)}\u2026` : name, from + 4,
      top + TRACK_HEIGHT / 2 - 1.5);
  }

  #drawAxis(pen, colours, width, height, scale) {
    pen.fillStyle = colours.muted;
    this.names.forEach((name, track) => pen.fillText(
      name, 0, AXIS_HEIGHT + track * TRACK_HEIGHT + TRACK_HEIGHT / 2));
    const step = roundUp(90 / scale);
    pen.strokeStyle = colours.line;
    for (let time = Math.ceil(this.from / step) * step; time <= this.to; time += step) {
      const x = Math.round(LABEL_WIDTH + (time - this.from) * scale) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS_HEIGHT - 5);
      pen.lineTo(x, height);
      pen.stroke();
      if (x < width - 50) pen.fillText(tickText(time, step), x + 4, AXIS_HEIGHT / 2);
    }
  }

  // The record under the pointer; the innermost, which is drawn last.
  #recordAt(event) {
    const { trace } = this;
    const track = Math.floor((event.offsetY - AXIS_HEIGHT) / TRACK_HEIGHT);
    if (event.offsetX < LABEL_WIDTH || track < 0) return -1;
    const perPixel = (this.to - this.from) / (this.canvas.clientWidth - LABEL_WIDTH);
    const time = this.from + (event.offsetX - LABEL_WIDTH) * perPixel;
    for (let i = trace.length - 1; i >= 0; i--) {
      if (this.track[i] === track && trace.start[i] - perPixel <= time
          && time <= trace.start[i] + trace.duration[i] + perPixel) return i;
    }
    return -1;
  }

  #listen() {
    const { canvas } = this;
    let grip = null;
    canvas.addEventListener("pointerdown", (event) => {
      grip = { x: event.offsetX, from: this.from, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (grip === null) {
        this.#showTip(event);
        return;
      }
      const span = this.to - this.from;
      const way = event.offsetX - grip.x;
      grip.moved ||= Math.abs(way) > 3;
      if (grip.moved) this.#moveTo(grip.from - way * span / (canvas.clientWidth - LABEL_WIDTH), span);
    });
    canvas.addEventListener("pointerup", (event) => {
      const i = grip !== null && !grip.moved ? this.#recordAt(event) : -1;
      grip = null;
      if (i >= 0) this.choose(i);
    });
    canvas.addEventListener("pointercancel", () => { grip = null; });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", () => this.showAll());
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      const place = (event.offsetX - LABEL_WIDTH) / (canvas.clientWidth - LABEL_WIDTH);
      this.zoom(2 ** (event.deltaY / 200), Math.min(Math.max(place, 0), 1));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    byId("zoom-in").addEventListener("click", () => this.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("zoom-all").addEventListener("click", () => this.showAll());
    new ResizeObserver(() => this.#later()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#later());
    byId("scheme").addEventListener("click", () => this.#later());
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const span = this.to - this.from;
    switch (event.key) {
      case "+": case "=": this.zoom(0.5); break;
      case "-": this.zoom(2); break;
      case "0": this.showAll(); break;
      case "ArrowLeft": this.#moveTo(this.from - span / 5, span); break;
      case "ArrowRight": this.#moveTo(this.from + span / 5, span); break;
      default: return;
    }
    event.preventDefault();
  }

  #showTip(event) {
    const i = this.#recordAt(event);
    this.tip.hidden = i < 0;
    if (i < 0) return;
    const { trace } = this;
    const facts = trace.of(i);
    const bytes = facts.type === "collective" ? `, ${bytesText(facts.wire_bytes)} sent` : "";
    const owner = facts.module ? `\n${facts.module}${facts.op ? ` \u203a ${facts.op}` : ""}` : "";
    this.tip.textContent = `${trace.name(i)}\n${timeText(trace.duration[i])}${bytes}${owner}`;
    const right = event.offsetX > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "auto" : `${event.offsetX + 14}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - event.offsetX + 14}px` : "auto";
    this.tip.style.top = `${event.offsetY + 14}px`;
  }
}

// The next number of the form 1, 2 or 5 times a power of ten.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((digit) => digit * power >= value) * power;
}

// Ticks have as many places as tell them apart.
function tickText(time, step) {
  const [unit, name] = step >= 1e5 ? [1e6, "s"] : step >= 100 ? [1000, "ms"] : [1, "\u00b5s"];
  return `${(time / unit).toFixed(Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9)))} ${name}`;
}

// Puts the page together.

const trace = new Trace(JSON.parse(byId("trace").textContent));
const view = new View(trace);

for (const name of ["module", "op", "redistribute", ...PHASES]) {
  const entry = make("span");
  const dot = make("span", `dot ${name}`);
  dot.dataset.colour = name;
  const legend = { module: "module", op: "operator", redistribute: "redistribution" };
  entry.append(dot, make("span", "", legend[name] ?? name));
  byId("legend").append(entry);
}

showHeading(trace);
new Filters(trace, view);
for (const key of ["module", "axis", "type"]) new Bars(trace, view, key);
new Parameters(trace);
const tree = new TreePane(trace, view);
new Timeline(trace, view, (i) => {
  view.reveal(i);
  tree.choose(i);
});
if (view.rows.length) tree.choose(view.rows[0]);

byId("search").addEventListener("input", (event) => view.search(event.target.value));
byId("unfold-all").addEventListener("click", () => view.setAllFolds(true));
byId("fold-all").addEventListener("click", () => view.setAllFolds(false));
byId("scheme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.style.colorScheme ? root.style.colorScheme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = dark ? "light" : "dark";
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    byId("search").focus();
  } else if (event.key === "Escape" && event.target.id !== "parameter-search") {
    view.clear();
    if (typing) byId("tree").focus();
  }
});

// A static page: images open large, are marked, and the marked ones are downloaded as lists that commands read.
{
  const main = document.querySelector("main");
  const { marks, search, withKeys, withPaths } = main.dataset;
  const items = new Map([...document.querySelectorAll(".hit, .query")].map((item) => [item.querySelector(".frame"), item]));
  // those in closed sections cannot have the focus
  const frames = () => [...items.keys()].filter((frame) => !frame.closest("details:not([open])"));
  const boxes = new Map(); // item -> its check box
  let changed = false;

  const textOf = (item, kind) => item.querySelector(kind)?.getAttribute("title") ?? "";
  const nameOf = (item) => textOf(item, ".name");

  function describe(frame) {
    const item = items.get(frame);
    const shown = frame.querySelector("img");
    const { place, file, key, size } = item.dataset;
    const similarity = item.querySelector(".similarity");
    const facts = [
      ["Path", place, true],
      ["Key", key, true],
      ["Label", textOf(item, ".label[title]")],
      ["Similarity", similarity && `${similarity.firstChild.textContent}, rank ${similarity.lastChild.textContent}`],
      ["Judged", frame.querySelector(".mark")?.title],
      ["Size", size],
      ["Search by it", search && key && search + shellWord(key), true],
    ];
    const actions = [];
    if (boxes.has(item)) actions.push(mirror(boxes.get(item)));
    if (file) {
      const address = "file://" + place.replaceAll("\\", "/").replace(/^(?!\/)/, "/").split("/").map(encodeURIComponent).join("/");
      actions.push(link("Open file", address), link("Open its folder", address.replace(/[^/]*$/, "")));
    }
    return { name: nameOf(item), src: shown?.src, tiny: shown?.className === "tiny", problem: frame.textContent.trim().replace("⊘", ""), facts, actions };
  }

  function link(text, address) {
    const made = element("a", "button small", text);
    made.href = address;
    made.target = "_blank";
    made.rel = "noopener";
    return made;
  }

  function markBox(label) {
    const made = element("label", "pick");
    const box = element("input");
    box.type = "checkbox";
    made.append(box, element("span", "", label));
    return [made, box];
  }

  // The check box of an image, again in the dialog.
  function mirror(original) {
    const [made, box] = markBox(marks);
    box.checked = original.checked;
    box.addEventListener("change", () => original.click());
    return made;
  }

  const viewer = makeViewer(frames, describe);
  for (const [frame, item] of items) {
    frame.tabIndex = 0;
    frame.setAttribute("role", "button");
    frame.setAttribute("aria-label", `${nameOf(item)} ${item.querySelector(".similarity")?.firstChild.textContent ?? ""}`.trim());
    frame.addEventListener("click", () => viewer.open(frame));
    if (!marks || item.dataset.mark === undefined) continue;
    const [made, box] = markBox(marks);
    box.checked = item.dataset.mark === "on";
    box.setAttribute("aria-label", `${marks}: ${nameOf(item)}`);
    boxes.set(item, box);
    item.classList.toggle("marked", box.checked);
    box.addEventListener("change", () => {
      changed = true;
      item.classList.toggle("marked", box.checked);
      showBar();
    });
    frame.after(made);
  }

  addEventListener("keydown", (event) => {
    if (event.metaKey || event.ctrlKey || event.altKey) return;
    const frame = document.activeElement;
    if (event.key.startsWith("Arrow")) moveFocus(event, frames());
    else if (items.has(frame) && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      viewer.open(frame);
    } else if (items.has(frame) && event.key === "x") boxes.get(items.get(frame))?.click();
  });

  // The bar of what is marked.
  const bar = element("div", "picked card");
  const said = element("p");
  said.setAttribute("role", "status");
  bar.hidden = true;
  bar.append(said, button("Unmark all", () => {
    for (const [item, box] of boxes) {
      box.checked = false;
      item.classList.remove("marked");
    }
    changed = true;
    showBar();
  }, "button small plain"));
  const lists = [
    ["keys", (item) => item.dataset.key, `${marks}-keys.txt`, withKeys, /[\r\n]/],
    // a list of paths is trimmed, and a tab begins a label
    ["paths", (item) => item.dataset.file && item.dataset.place, `${marks}.txt`, withPaths, /[\r\n\t]|^\s|\s$/],
  ];
  for (const [what, valueOf, name, command, unfit] of lists) {
    if (![...boxes.keys()].some(valueOf)) continue;
    const row = element("div", "picked-list");
    row.append(button(`Download ${what}: ${name}`, () => save(what, valueOf, name, unfit)));
    if (command) row.append(element("code", "", `${command} ${name}`), copyButton(`${command} ${name}`));
    bar.append(row);
  }
  document.body.append(bar);

  function markedItems() {
    return [...boxes].filter(([, box]) => box.checked).map(([item]) => item);
  }

  function showBar(note = "") {
    const marked = markedItems().length;
    bar.hidden = !marked && !note;
    said.textContent = `${marked.toLocaleString("en")} of ${boxes.size.toLocaleString("en")} images ${marks === "selected" ? marks : `marked: ${marks}`}. ${note}`;
  }

  function save(what, valueOf, name, unfit) {
    const all = new Set(markedItems().map(valueOf).filter(Boolean));
    const lines = [...all].filter((line) => !unfit.test(line));
    const made = element("a");
    made.href = URL.createObjectURL(new Blob(lines.map((line) => line + "\n"), { type: "text/plain" }));
    made.download = name;
    made.click();
    setTimeout(() => URL.revokeObjectURL(made.href), 60000);
    changed = false;
    const left = all.size - lines.length;
    showBar(`${lines.length.toLocaleString("en")} ${what} in ${name}${left ? `; ${left} left out, which a list of lines cannot hold` : ""}.`);
  }

  addEventListener("beforeunload", (event) => { if (changed) event.preventDefault(); });
  const reveal = () => {
    const section = location.hash.length > 1 && document.getElementById(location.hash.slice(1))?.closest("details");
    if (section) section.open = true;
  };
  addEventListener("hashchange", reveal);
  document.querySelector("nav")?.addEventListener("click", () => setTimeout(reveal)); // the same address again
  reveal();
  showBar();
}

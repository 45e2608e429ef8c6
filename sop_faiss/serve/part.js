"use strict";
// A dialog in which a part of an image is chosen: drawn by mouse, pen or finger, or moved and resized by arrow keys.

const PART_STEP = 0.02; // of a side
const LEAST_PART = 0.01;

const between = (value, least, most) => Math.min(Math.max(value, least), most);

// chosen(box): [left, top, right, bottom] in shares of the sides, or null for the complete image.
function makePartChooser(chosen) {
  const dialog = element("dialog", "large");
  const heading = element("h2", "large-name", "Search by a part");
  const help = element("p", "quiet", "Draw a box. Arrow keys move it, with Shift they change its size.");
  const stage = element("div", "part-stage");
  const image = element("img");
  const mark = element("div", "part-box");
  const said = element("p", "quiet");
  const actions = element("div", "large-actions");
  let box = null;
  let start = null;
  let before = null;

  heading.id = "part-name";
  dialog.setAttribute("aria-labelledby", heading.id);
  said.setAttribute("aria-live", "polite");
  mark.tabIndex = 0;
  mark.setAttribute("role", "application"); // so that screen readers pass arrow keys on
  image.draggable = false;
  image.addEventListener("error", () => { said.textContent = "This image cannot be shown here."; });
  stage.append(image, mark);
  const place = element("div", "part-place");
  place.append(stage);
  actions.append(
    button("Search by this part", () => finish(box)), button("Complete image", () => finish(null), "button small plain"),
    button("Cancel", () => dialog.close(), "button small plain"),
  );
  dialog.append(heading, help, place, said, actions);

  function finish(part) {
    dialog.close();
    chosen(part);
  }

  function draw() {
    const [left, top, right, bottom] = box.map((share) => 100 * share);
    Object.assign(mark.style, { left: `${left}%`, top: `${top}%`, width: `${right - left}%`, height: `${bottom - top}%` });
    const text = `${Math.round(left)} to ${Math.round(right)} % from the left, ${Math.round(top)} to ${Math.round(bottom)} % from the top`;
    said.textContent = text;
    mark.setAttribute("aria-label", `The part: ${text}`);
  }

  function pointOf(event) {
    const frame = stage.getBoundingClientRect();
    return [between((event.clientX - frame.left) / frame.width, 0, 1), between((event.clientY - frame.top) / frame.height, 0, 1)];
  }

  function follow(event) {
    if (!start) return;
    const [x, y] = pointOf(event);
    box = [Math.min(x, start[0]), Math.min(y, start[1]), Math.max(x, start[0]), Math.max(y, start[1])];
    draw();
  }

  stage.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    event.preventDefault();
    stage.setPointerCapture(event.pointerId);
    [start, before] = [pointOf(event), box];
  });
  stage.addEventListener("pointermove", follow);
  for (const end of ["pointerup", "pointercancel"]) {
    stage.addEventListener(end, (event) => {
      if (!start) return;
      follow(event);
      start = null;
      if (end === "pointercancel" || box[2] - box[0] < LEAST_PART || box[3] - box[1] < LEAST_PART) box = before;
      draw();
      mark.focus();
    });
  }
  mark.addEventListener("keydown", (event) => {
    const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] || [0, 0];
    if (event.key === "Enter") finish(box);
    if (!x && !y) return;
    event.preventDefault();
    if (event.shiftKey) {
      box[2] = between(box[2] + x * PART_STEP, box[0] + LEAST_PART, 1);
      box[3] = between(box[3] + y * PART_STEP, box[1] + LEAST_PART, 1);
    } else {
      const across = between(x * PART_STEP, -box[0], 1 - box[2]);
      const down = between(y * PART_STEP, -box[1], 1 - box[3]);
      box = [box[0] + across, box[1] + down, box[2] + across, box[3] + down];
    }
    draw();
  });
  dialog.addEventListener("keydown", (event) => event.stopPropagation()); // the page's own keys wait
  dialog.addEventListener("close", () => dialog.remove());

  function open(src, name, part) {
    box = part ? [...part] : [0.25, 0.25, 0.75, 0.75];
    image.alt = name;
    image.src = src;
    draw();
    document.body.append(dialog);
    dialog.showModal();
    mark.focus();
  }
  return { open };
}

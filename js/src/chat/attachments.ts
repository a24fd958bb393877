// Images that go with the next question: picked, dropped or pasted. Their bytes stay here until it is sent.
import { h, setText } from "../dom";

/** What the notebook's connection surely carries in one message. */
export const MAX_BYTES = 8_000_000;
export const MAX_IMAGES = 8;

export class Attachments {
  private readonly picker = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, tabindex: -1, "aria-label": "Image files" });
  private readonly add = h("button", { type: "button", "data-do": "pick" }, "Add image");
  private readonly hint = h("small", { role: "status" });
  private readonly list = h("div", { class: "picked" });
  readonly element = h("div", { class: "attach", hidden: true }, this.picker, this.add, this.hint, this.list);
  private files: File[] = [];
  private allowed = false;

  /** `changed` is called whenever there are other images than before. */
  constructor(private readonly changed: () => void) {
    this.say("");
    this.add.addEventListener("click", () => this.picker.click());
    this.picker.addEventListener("change", () => {
      this.take([...(this.picker.files ?? [])]);
      this.picker.value = "";
    });
  }

  get count(): number {
    return this.files.length;
  }

  get all(): File[] {
    return [...this.files];
  }

  allow(allowed: boolean): void {
    this.allowed = allowed;
    this.element.hidden = !allowed && this.files.length === 0;
    if (!allowed && this.files.length > 0) this.say("This model takes text only: remove the images, or use another.");
  }

  /** Attaches the images among the files, as far as they fit. */
  take(files: readonly File[]): void {
    if (files.length === 0) return;
    if (!this.allowed) {
      this.element.hidden = false;
      this.say("This model takes text only.");
      return;
    }
    const images = files.filter((file) => file.type.startsWith("image/"));
    let problem = images.length < files.length ? "Only images can be attached." : "";
    for (const image of images) {
      const bytes = this.files.reduce((sum, file) => sum + file.size, image.size);
      if (this.files.length >= MAX_IMAGES) problem = `A question has ${MAX_IMAGES} images at most.`;
      else if (bytes > MAX_BYTES) problem = `The images of a question have ${MAX_BYTES / 1e6} MB at most: make them smaller.`;
      else this.files.push(image);
    }
    this.paint();
    this.say(problem);
  }

  /** Hands the images out, and forgets them. */
  async release(): Promise<{ names: string[]; buffers: ArrayBuffer[] }> {
    const files = this.files;
    this.files = [];
    this.paint();
    this.say("");
    return { names: files.map((file) => file.name), buffers: await Promise.all(files.map((file) => file.arrayBuffer())) };
  }

  dispose(): void {
    for (const image of this.list.querySelectorAll("img")) URL.revokeObjectURL(image.src);
  }

  private say(problem: string): void {
    setText(this.hint, problem || "or drop one here, or paste it");
    this.hint.toggleAttribute("data-problem", problem !== "");
  }

  private paint(): void {
    this.changed();
    for (const image of this.list.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    this.list.replaceChildren(
      ...this.files.map((file) => {
        const remove = h("button", { type: "button", "data-kind": "quiet", "aria-label": `Remove ${file.name}` }, "Remove");
        remove.addEventListener("click", () => {
          this.files = this.files.filter((each) => each !== file);
          this.paint();
          this.allow(this.allowed);
          this.add.focus();
        });
        return h("figure", {}, h("img", { src: URL.createObjectURL(file), alt: "" }), h("figcaption", {}, file.name), remove);
      }),
    );
  }
}

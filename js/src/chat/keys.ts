// Enter and Escape in a field, kept from the notebook; Shift + Enter stays a new line, and so does an input method's.

export function onKeys(field: HTMLTextAreaElement, { enter, escape }: { enter: () => void; escape: () => void }): void {
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      enter();
    } else if (event.key === "Escape") {
      event.preventDefault();
      escape();
    }
  });
}

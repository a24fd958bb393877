// Buttons whose width never changes: data-alt reserves the room of the longer label.
import { h } from "./dom";

const ARMED_MS = 3000;

export interface ConfirmButton {
  element: HTMLButtonElement;
  /** Enables or disables it; a disabled button is disarmed. */
  enable(enabled: boolean): void;
  dispose(): void;
}

/** A button that arms on the first press, for three seconds, and acts on the second. */
export function confirmButton(label: string, question: string, act: () => void): ConfirmButton {
  const text = document.createTextNode(label);
  const element = h("button", { type: "button", "data-alt": question }, text);
  let timer: ReturnType<typeof setTimeout> | undefined;

  const disarm = () => {
    clearTimeout(timer);
    timer = undefined;
    element.removeAttribute("data-armed");
    text.data = label;
    element.dataset.alt = question;
  };
  element.addEventListener("click", () => {
    if (timer !== undefined) {
      disarm();
      act();
      return;
    }
    element.setAttribute("data-armed", "");
    text.data = question;
    element.dataset.alt = label;
    timer = setTimeout(disarm, ARMED_MS);
  });
  return {
    element,
    enable(enabled) {
      element.disabled = !enabled;
      if (!enabled && timer !== undefined) disarm();
    },
    dispose: () => clearTimeout(timer),
  };
}

/** A button that copies what `text()` returns at that moment, and says so. */
export function copyButton(text: () => string): HTMLButtonElement {
  const label = document.createTextNode("Copy");
  const element = h("button", { type: "button", "data-alt": "Copied" }, label);
  element.addEventListener("click", async () => {
    // Without a secure context there is no clipboard; the command stays selectable beside the button.
    try {
      await navigator.clipboard.writeText(text());
      label.data = "Copied";
    } catch {
      label.data = "Select";
    }
    setTimeout(() => (label.data = "Copy"), 2000);
  });
  return element;
}

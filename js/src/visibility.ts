// Tells Python whether a view can be seen, so that nothing is sent when nobody looks.
import type { ViewChange } from "./protocol";

/**
 * A view's first message may start the comm's subshell, and then waits on the main shell for the running cell.
 * Said again, it arrives; the order lets Python drop whichever copy comes late.
 */
const REPEAT_MS = [300, 1500];

/** Reports now and at each change, until disposed. A page in the background is nobody looking. */
export function watchVisibility(report: (change: ViewChange) => void): { dispose(): void } {
  const view = Math.random().toString(36).slice(2);
  let order = 0;
  let open = false;
  let timers: ReturnType<typeof setTimeout>[] = [];

  const say = (now: boolean) => {
    if (now === open) return;
    open = now;
    const change: ViewChange = { kind: "view", view, order: (order += 1), open };
    report(change);
    timers.forEach(clearTimeout);
    timers = open ? REPEAT_MS.map((delay) => setTimeout(() => report(change), delay)) : [];
  };
  const look = () => say(document.visibilityState === "visible");

  document.addEventListener("visibilitychange", look);
  look();
  return {
    dispose() {
      document.removeEventListener("visibilitychange", look);
      say(false);
    },
  };
}

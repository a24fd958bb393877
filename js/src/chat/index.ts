// The chat panel as anywidget loads it.
import { widget } from "../mount";
import type { ChatTraits } from "../protocol";
import { ChatView } from "./view";

export default widget<ChatTraits>(["head", "talk", "figures", "settings"], (send, model) => new ChatView(send, model));

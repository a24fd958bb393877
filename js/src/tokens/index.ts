// The token view as anywidget loads it.
import { widget } from "../mount";
import type { TokensTraits } from "../protocol";
import { TokensView } from "./view";

export default widget<TokensTraits>(["answer", "figures", "tokens"], (send) => new TokensView(send));

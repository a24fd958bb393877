// All turns as far as they were told: Python sends what changed, and everything to a view that missed something.
import type { ChatTalk, ChatTurn } from "../protocol";

export class Log {
  private turns = new Map<string, ChatTurn>();
  private revision = 0;

  /** Takes in what changed; false where something was missed before. */
  take(talk: ChatTalk): boolean {
    if (talk.base === 0) this.turns.clear();
    else if (talk.base !== this.revision) return talk.revision === this.revision;
    const known = this.turns;
    for (const turn of talk.turns) known.set(turn.key, turn);
    for (const { key, answer, reasoning, status } of talk.grown) {
      const turn = known.get(key);
      if (!turn) return false;
      known.set(key, { ...turn, answer: turn.answer + answer, reasoning: turn.reasoning + reasoning, status });
    }
    if (!talk.keys.every((key) => known.has(key))) return false;
    this.turns = new Map(talk.keys.map((key) => [key, known.get(key)!]));
    this.revision = talk.revision;
    return true;
  }

  /** In order; a turn that did not change is the same object as before. */
  all(): ChatTurn[] {
    return [...this.turns.values()];
  }
}

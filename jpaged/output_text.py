"""The text of one output as its tokens arrive: detokenized, ended by stop strings, and how much may be shown."""

from __future__ import annotations

from jpaged_models import Tokenizer

from jpaged.detokenizer import Detokenizer
from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.stop_strings import count_held, find_stop


class OutputText:
    """Text of a request's output; `update` after each time it got tokens, `shown` is what a user may see.

    Without stop strings tokens are decoded when the text is asked for, many at once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.params = params
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self.text = ""
        self.fed = 0  # tokens of the output that are in the text, or held back by the detokenizer
        self.ended = False
        self.stop_is_text = params.include_stop_str_in_output

    def update(self, request: Request) -> str | None:
        """Search new tokens for stop strings. Returns the one that ends the output; tokens after it are taken off."""
        if not self.params.stop or self.ended:
            return None
        output = request.output_token_ids
        last = len(output) - self._hidden(request)
        while self.fed < last:
            searched = len(self.text)
            self.text += self.detokenizer.feed(output[self.fed : self.fed + 1])
            self.fed += 1
            if self.fed == last and request.finished:
                self.text += self.detokenizer.flush()
            if self.fed <= self.params.min_tokens:
                continue
            stop = find_stop(self.text, searched, self.params.stop)
            if stop is not None:
                self.text = self.text[: stop.end if self.stop_is_text else stop.start]
                self.ended = True
                del output[self.fed :]
                return stop.string
        return None

    def shown(self, request: Request) -> str:
        """All text that can no longer change: without what could become a stop string, unless the output has ended."""
        if not self.ended:
            last = len(request.output_token_ids) - self._hidden(request)
            self.text += self.detokenizer.feed(request.output_token_ids[self.fed : last])
            self.fed = last
            if request.finished:
                self.text += self.detokenizer.flush()
                self.ended = True
        if self.ended or not self.params.stop or self.stop_is_text:
            return self.text
        return self.text[: len(self.text) - count_held(self.text, self.params.stop)]

    def _hidden(self, request: Request) -> int:
        """The token that ended the output is no text, unless the request wants it to be."""
        if request.finish_reason != "stop" or self.stop_is_text:
            return 0
        return int(bool(request.output_token_ids) and request.output_token_ids[-1] in request.stop_ids)

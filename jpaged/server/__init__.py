"""An HTTP server that speaks OpenAI's API: `jpaged serve`. Needs the extra `server`.

serving.py                    from command-line settings to a running server; settings.py
app.py                        routes and middleware (middleware.py); service.py is what every route works with
completions.py, chat.py, embeddings.py, tokens.py, models.py, admin.py    the routes
protocol_*.py                 requests as pydantic models, checked where they come in; openapi.py: a document of them
generation.py                 from prompts to outputs; event_stream.py, logprob_objects.py, errors.py: what goes out
tool_use.py, tool_parsers/    tool calls out of what a model writes
metrics.py, block_times.py, dashboard/, feed.py    what an operator sees
"""

#!/usr/bin/env python3
"""harmony.py LIBRARY TOKENIZER COUNT: conversations at random, rendered by the library and by openai-harmony.

Every id must be equal; and of the answers in them, what both read. openai-harmony takes its vocabulary from the folder
that TIKTOKEN_ENCODINGS_BASE names. The library's side is its C API: JSON text of chat completions in, ids out.
"""
import ctypes
import json
import random
import sys

import openai_harmony as oh

ENCODING = oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)

WORDS = """hello world the a <|start|> <|end|> <|message|>assistant <|channel|>final naïve Größe 東京 नमस्ते 👩‍👩‍👧 12345
3.14 def f(x): return x # comment {"a": [1, null]} \t \n \n\n // */ "quoted" 'tis don't I'LL \u3000 \u200d e\u0301
<b>&amp;</b> functions.f to=user :colon https://example.org/a?b=c $x^2$ `code` \\n ... !? SELECT * FROM t; \r\n
""".split(" ")


class Tokens(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("ids", ctypes.POINTER(ctypes.c_int)), ("count", ctypes.c_size_t)]


class Text(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("bytes", ctypes.POINTER(ctypes.c_char)), ("length", ctypes.c_size_t)]


class Library:
    def __init__(self, path, tokenizer):
        self.c = ctypes.CDLL(path)
        self.c.getp_tokenizer_open.restype = ctypes.c_void_p
        self.c.getp_last_error.restype = ctypes.c_char_p
        for name, result in [("getp_harmony_render", Tokens), ("getp_harmony_read", Text)]:
            getattr(self.c, name).restype = ctypes.POINTER(result)
        self.tokenizer = ctypes.c_void_p(self.c.getp_tokenizer_open(tokenizer.encode()))
        assert self.tokenizer.value, self.c.getp_last_error()

    def render(self, request):
        text = json.dumps(request, ensure_ascii=random.random() < 0.5).encode()
        tokens = self.c.getp_harmony_render(self.tokenizer, text, ctypes.c_size_t(len(text)))
        assert tokens, self.c.getp_last_error()
        ids = tokens.contents.ids[:tokens.contents.count]
        self.c.getp_tokens_free(tokens)
        return ids

    def read(self, ids):
        array = (ctypes.c_int * len(ids))(*ids)
        text = self.c.getp_harmony_read(self.tokenizer, array, ctypes.c_size_t(len(ids)))
        assert text, self.c.getp_last_error()
        read = json.loads(text.contents.bytes[:text.contents.length])
        self.c.getp_text_free(text)
        return read


def maybe(share):
    return random.random() < share


def words(most=12):
    return random.choice([" ", "", "\n"]).join(random.choices(WORDS, k=random.randint(1, most)))


def name():
    return "".join(random.choices("abcdefgh_XYZ", k=random.randint(1, 10)))


def schema(depth=0):
    """A JSON schema with what programs write, and what few do."""
    kinds = ["string", "number", "integer", "boolean", "null", "array", "object", "enum", "types", "oneOf", "any"]
    kind = random.choice(kinds if depth < 3 else kinds[:5])
    made = {}
    if kind == "enum":
        made = {"type": "string", "enum": [name() for _ in range(random.randint(0, 3))] + [3] * maybe(0.1)}
    elif kind == "types":
        made = {"type": random.sample(["integer", "string", "null", "number"], k=random.randint(0, 3))}
    elif kind == "oneOf":
        made = {"oneOf": [schema(depth + 1) for _ in range(random.randint(0, 3))]}
        if maybe(0.2):
            made["type"] = "object"
    elif kind == "array":
        made = {"type": "array"}
        if maybe(0.8):
            made["items"] = schema(depth + 1)
    elif kind == "object":
        made = {"type": "object"}
        if maybe(0.9):
            properties = {name(): schema(depth + 1) for _ in range(random.randint(0, 4))}
            made["properties"] = properties
            if maybe(0.7):
                made["required"] = [key for key in properties if maybe(0.5)]
    elif kind != "any":
        made = {"type": kind}
    if maybe(0.4):
        made["description"] = random.choice(["a thing", words(5)])
    if maybe(0.1):
        made["title"] = words(3)
    if maybe(0.1):
        made["examples"] = [words(2) for _ in range(random.randint(0, 2))] + [5] * maybe(0.3)
    if maybe(0.2):
        made["nullable"] = maybe(0.8)
    if maybe(0.3):
        made["default"] = random.choice([None, True, 3, -1, 2.5, 1e30, "x", words(3), [1, "a"], {"b": 1, "a": None}])
    return dict(random.sample(list(made.items()), k=len(made)))


def tool():
    made = {"name": name()}
    if maybe(0.8):
        made["description"] = words()
    if maybe(0.8):
        parameters = schema()
        if maybe(0.7):
            parameters = {"type": "object", "properties": {name(): schema() for _ in range(random.randint(0, 4))}}
        made["parameters"] = parameters
    if maybe(0.2):
        made["strict"] = maybe(0.5)
    return made


def message(role, texts, **fields):
    made = oh.Message.from_role_and_contents(role, [oh.TextContent(text=text) for text in texts])
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def content(share_of_parts=0.2):
    """A content of chat completions, and its texts."""
    if maybe(share_of_parts):
        texts = [words() for _ in range(random.randint(1, 3))]
        return [{"type": "text", "text": text} for text in texts], texts
    text = words()
    return text, [text]


def conversation():
    """A request of chat completions, and the same conversation for openai-harmony."""
    request, chat, harmony = {}, [], []
    system = oh.SystemContent.new()
    if maybe(0.6):
        request["reasoning_effort"] = random.choice(["low", "medium", "high"])
        system = system.with_reasoning_effort(oh.ReasoningEffort[request["reasoning_effort"].upper()])
    if maybe(0.6):
        request["date"] = random.choice(["2025-06-28", words(3)])
        system = system.with_conversation_start_date(request["date"])
    if maybe(0.1):
        request["knowledge_cutoff"] = "2024-0" + str(random.randint(1, 9))
        system = system.with_knowledge_cutoff(request["knowledge_cutoff"])
    if maybe(0.1):
        request["model_identity"] = words()
        system = system.with_model_identity(request["model_identity"])
    harmony.append(oh.Message.from_role_and_content(oh.Role.SYSTEM, system))
    instructions = []
    for _ in range(random.choice([0, 1, 1, 2])):
        given, texts = content()
        chat.append({"role": random.choice(["system", "developer"]), "content": given})
        instructions.append("".join(texts))
    tools = [tool() for _ in range(random.choice([0, 0, 1, 3]))]
    if tools or maybe(0.1):
        request["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if instructions or tools:
        developer = oh.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions("\n\n".join(instructions))
        if tools:
            developer = developer.with_function_tools([
                oh.ToolDescription.new(tool["name"], tool.get("description", ""), tool.get("parameters"))
                for tool in tools
            ])
        harmony.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
    for _ in range(random.randint(1, 5)):
        turn(chat, harmony)
    # A conversation ends with the user's word, or with the tools'.
    if maybe(0.3):
        while chat and chat[-1]["role"] == "assistant" and not chat[-1].get("tool_calls"):
            chat.append({"role": "user", "content": "go on"})
            harmony.append(message(oh.Role.USER, ["go on"]))
    request["messages"] = chat
    bare = list(request) == ["messages"] and maybe(0.5)
    return chat if bare else request, harmony


def turn(chat, harmony):
    given, texts = content()
    user = {"role": "user", "content": given}
    author = oh.Author(role=oh.Role.USER)
    if maybe(0.1):
        user["name"] = name()
        author = oh.Author.new(oh.Role.USER, user["name"])
    chat.append(user)
    harmony.append(message(oh.Role.USER, texts, author=author))
    if maybe(0.1):
        text = words()
        chat.append({"role": "developer", "content": text})
        developer = oh.DeveloperContent.new().with_instructions(text)
        harmony.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
    for round in range(random.choice([0, 1, 1, 2])):
        said = {"role": "assistant"}
        if maybe(0.6):
            said[random.choice(["reasoning", "reasoning_content", "thinking"])] = text = words()
            harmony.append(message(oh.Role.ASSISTANT, [text], channel="analysis"))
        if maybe(0.5):
            said["content"] = text = words() or None
            harmony.append(message(oh.Role.ASSISTANT, [text], channel="commentary"))
        calls = []
        for at in range(random.choice([1, 1, 2])):
            call = {"id": f"call_{at}", "type": "function", "function": {"name": name(), "arguments": words()}}
            calls.append(call)
            harmony.append(message(
                oh.Role.ASSISTANT, [call["function"]["arguments"]], channel="commentary",
                recipient="functions." + call["function"]["name"], content_type="<|constrain|>json"))
        said["tool_calls"] = calls
        chat.append(said)
        for call in calls:
            given, texts = content()
            chat.append({"role": "tool", "tool_call_id": call["id"], "content": given})
            author = oh.Author.new(oh.Role.TOOL, "functions." + call["function"]["name"])
            harmony.append(message(oh.Role.TOOL, texts, author=author, channel="commentary", recipient="assistant"))
    if maybe(0.8):
        said = {"role": "assistant"}
        if maybe(0.6):
            said["reasoning"] = text = words()
            harmony.append(message(oh.Role.ASSISTANT, [text], channel="analysis"))
        said["content"], texts = content()
        chat.append(said)
        harmony.append(message(oh.Role.ASSISTANT, texts, channel="final"))


def check_rendering(library):
    request, messages = conversation()
    expected = ENCODING.render_conversation_for_completion(oh.Conversation.from_messages(messages), oh.Role.ASSISTANT)
    ids = library.render(request)
    compare(ids, expected, request)
    # Without the beginning of an answer.
    if isinstance(request, dict):
        ids = library.render({**request, "add_generation_prompt": False})
        expected = ENCODING.render_conversation(oh.Conversation.from_messages(messages))
        compare(ids, expected, request)
    if messages[-1].channel == "final":
        check_continuation(library, request, messages)
    return len(expected)


def check_continuation(library, request, messages):
    """The last message stays open, and what was thought before it is part of the answer."""
    request = request if isinstance(request, dict) else {"messages": request}
    ids = library.render({**request, "continue_final_message": True})
    first = len(messages)
    while messages[first - 1].author.role == oh.Role.ASSISTANT:
        first -= 1
    # The messages before, of which openai-harmony drops what it drops of a conversation that ends there.
    before = oh.Conversation.from_messages(messages[:first])
    expected = ENCODING.render_conversation(before)
    for open_message in messages[first:]:
        expected += ENCODING.render(open_message)
    compare(ids, expected[:-1], request)


def compare(ids, expected, request):
    if ids == expected:
        return
    at = next((at for at, pair in enumerate(zip(ids, expected)) if pair[0] != pair[1]), min(len(ids), len(expected)))
    print(json.dumps(request, indent=1)[:4000])
    print("ours:  ", repr(ENCODING.decode(ids[max(at - 20, 0):at + 20])))
    print("theirs:", repr(ENCODING.decode(expected[max(at - 20, 0):at + 20])))
    sys.exit(f"FAILED: token {at} differs")


def check_reading(library):
    """An answer as the model writes it."""
    messages = []
    if maybe(0.7):
        messages.append(message(oh.Role.ASSISTANT, [words()], channel="analysis"))
    if maybe(0.3):
        messages.append(message(oh.Role.ASSISTANT, [words()], channel="commentary"))
    calls = maybe(0.4)
    if calls:
        kind = random.choice(["<|constrain|>json", "json", None])
        messages.append(message(oh.Role.ASSISTANT, [words()], channel="commentary", recipient="functions." + name(),
                                content_type=kind))
    else:
        messages.append(message(oh.Role.ASSISTANT, [words()], channel="final"))
    rendered = ENCODING.render_conversation_for_training(
        oh.Conversation.from_messages(messages), oh.RenderConversationConfig(auto_drop_analysis=False))
    # The prompt ends behind `<|start|>assistant`.
    ids = rendered[2:]
    theirs = [parsed.to_dict() for parsed in ENCODING.parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT)]
    read = library.read(ids)
    for ours, parsed in zip(read["messages"], theirs):
        text = "".join(part["text"] for part in parsed["content"])
        expected = {"role": parsed["role"], "content": text}
        for field in ["recipient", "channel", "content_type"]:
            if parsed.get(field) is not None:
                expected[field] = parsed[field]
        assert ours == expected, (ours, expected)
    assert len(read["messages"]) == len(theirs), (read, theirs)
    assert read["finish_reason"] == ("tool_calls" if calls else "stop"), read


def main():
    path, tokenizer, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    library = Library(path, tokenizer)
    tokens = 0
    for seed in range(count):
        random.seed(seed)
        tokens += check_rendering(library)
        check_reading(library)
    print(f"ok: {count} conversations, {tokens} ids equal to openai-harmony's; {count} answers read alike")


if __name__ == "__main__":
    main()

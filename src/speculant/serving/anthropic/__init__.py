"""An API in Anthropic's shape: its Messages are translated to chats, and answers of chats to its messages."""

// What Ollama does with the template of a Modelfile, for test_modelfile.py: render chats, find the marks of thinking
// and of tool calls. Reads a JSON object {template, chats} and writes {prompts, thinking, tool_call}.
package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"text/template"
	"text/template/parse"
)

type compact json.RawMessage // Ollama prints tools and arguments as JSON without spaces

func (c *compact) UnmarshalJSON(text []byte) error {
	var buffer bytes.Buffer
	err := json.Compact(&buffer, text)
	*c = compact(buffer.Bytes())
	return err
}

func (c compact) String() string { return string(c) }

type message struct {
	Role, Content, Thinking string
	ToolCalls               []struct {
		Function struct {
			Name      string
			Arguments compact
		}
	} `json:"tool_calls"`
}

type chat struct {
	Messages []*message
	Tools    []struct{ Function compact }
	Think    bool
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// uses says whether a pipeline names this field of the dot.
func uses(pipe *parse.PipeNode, field string) bool {
	for _, command := range pipe.Cmds {
		for _, argument := range command.Args {
			if node, ok := argument.(*parse.FieldNode); ok && node.Ident[0] == field {
				return true
			}
		}
	}
	return false
}

// texts returns the texts of a list in order, those of what is nested in it, too.
func texts(list *parse.ListNode) (found []string) {
	for _, node := range list.Nodes {
		if text, ok := node.(*parse.TextNode); ok {
			found = append(found, strings.TrimSpace(string(text.Text)))
		} else if branch := branchOf(node); branch != nil {
			found = append(found, texts(branch.List)...)
		}
	}
	return
}

func branchOf(node parse.Node) *parse.BranchNode {
	switch node := node.(type) {
	case *parse.IfNode:
		return &node.BranchNode
	case *parse.RangeNode:
		return &node.BranchNode
	case *parse.WithNode:
		return &node.BranchNode
	}
	return nil
}

// walk calls visit with each list, and each list's branches.
func walk(list *parse.ListNode, visit func(*parse.ListNode, parse.Node)) {
	if list == nil {
		return
	}
	for _, node := range list.Nodes {
		visit(list, node)
		if branch := branchOf(node); branch != nil {
			walk(branch.List, visit)
			walk(branch.ElseList, visit)
		}
	}
}

func main() {
	var input struct {
		Template string
		Chats    []chat
	}
	check(json.NewDecoder(os.Stdin).Decode(&input))
	parsed := template.Must(template.New("").Option("missingkey=zero").Parse(input.Template))
	output := struct {
		Prompts  []string `json:"prompts"`
		Thinking []string `json:"thinking"`
		ToolCall string   `json:"tool_call"`
	}{}
	for _, chat := range input.Chats {
		var prompt strings.Builder
		values := map[string]any{"Messages": chat.Messages, "Tools": chat.Tools, "Think": chat.Think}
		check(parsed.Execute(&prompt, values))
		output.Prompts = append(output.Prompts, prompt.String())
	}
	walk(parsed.Root, func(list *parse.ListNode, node parse.Node) {
		if action, ok := node.(*parse.ActionNode); ok && uses(action.Pipe, "Thinking") {
			around := texts(list)
			output.Thinking = []string{around[0], around[len(around)-1]}
		}
		if branch, ok := node.(*parse.IfNode); ok && uses(branch.Pipe, "ToolCalls") && output.ToolCall == "" {
			output.ToolCall, _, _ = strings.Cut(texts(branch.List)[0], "{")
		}
	})
	check(json.NewEncoder(os.Stdout).Encode(output))
}

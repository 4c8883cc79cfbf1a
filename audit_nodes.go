package edgelimit

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// auditNode is a line of a Caddyfile with the block that it opens, unread: the
// audit also understands what no module of this binary would.
type auditNode struct {
	spot
	name     string
	args     []string
	children []*auditNode
	tokens   []caddyfile.Token // all of them, braces too
	head     int               // how many of tokens are the name and the arguments
}

// maxNesting bounds how deep blocks may stand in each other.
const maxNesting = 200

// readNodes makes a tree of the tokens of a block's inside.
func readNodes(tokens []caddyfile.Token, nesting int) ([]*auditNode, error) {
	var nodes []*auditNode
	for i := 0; i < len(tokens); {
		n, length, err := readNode(tokens[i:], nesting)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, n)
		i += length
	}
	return nodes, nil
}

// readNode reads the line that begins with the first token, and its block.
func readNode(tokens []caddyfile.Token, nesting int) (n *auditNode, length int, err error) {
	first := tokens[0]
	n = &auditNode{spot: spotOfToken(first), name: first.Text, head: 1}
	if nesting > maxNesting {
		return nil, 0, fmt.Errorf("%s: blocks are nested more than %d deep", n.spot, maxNesting)
	}
	for n.head < len(tokens) && !startsLine(tokens[n.head-1], tokens[n.head]) && !isBrace(tokens[n.head], "{") {
		n.args = append(n.args, tokens[n.head].Text)
		n.head++
	}
	length = n.head
	if length < len(tokens) && isBrace(tokens[length], "{") && !startsLine(tokens[length-1], tokens[length]) {
		end := closingBrace(tokens, length)
		if n.children, err = readNodes(tokens[length+1:end], nesting+1); err != nil {
			return nil, 0, err
		}
		length = min(end+1, len(tokens))
	}
	n.tokens = tokens[:length]
	return n, length, nil
}

// closingBrace is the index of the brace that closes the one at open, or the
// number of tokens if none does.
func closingBrace(tokens []caddyfile.Token, open int) int {
	depth := 0
	for i := open; i < len(tokens); i++ {
		switch {
		case isBrace(tokens[i], "{"):
			depth++
		case isBrace(tokens[i], "}"):
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return len(tokens)
}

func isBrace(token caddyfile.Token, brace string) bool { return token.Text == brace && !token.Quoted() }

// startsLine says whether token b begins a new line after token a. Only Caddy's
// dispenser knows, because tokens remember privately what imported them.
func startsLine(a, b caddyfile.Token) bool {
	d := caddyfile.NewDispenser([]caddyfile.Token{a, b})
	d.Next()
	return d.NextLine()
}

func spotOfToken(token caddyfile.Token) spot {
	return spot{File: shortPath(token.File), Line: token.Line}
}

// shortPath is a path from here, where it is below: Caddy makes those of
// imported files absolute.
func shortPath(path string) string {
	if here, err := os.Getwd(); err == nil && filepath.IsAbs(path) {
		if short, err := filepath.Rel(here, path); err == nil && filepath.IsLocal(short) {
			return short
		}
	}
	return path
}

// child is the first line of the block with that name, or nil.
func (n *auditNode) child(name string) *auditNode {
	i := slices.IndexFunc(n.children, func(child *auditNode) bool { return child.name == name })
	if i < 0 {
		return nil
	}
	return n.children[i]
}

// without is the node's tokens, but for the lines of its block that begin with
// one of the words.
func (n *auditNode) without(words ...string) []caddyfile.Token {
	tokens := slices.Clone(n.tokens[:n.head])
	if len(n.tokens) == n.head {
		return tokens
	}
	tokens = append(tokens, n.tokens[n.head])
	for _, child := range n.children {
		if !slices.Contains(words, child.name) {
			tokens = append(tokens, child.tokens...)
		}
	}
	return append(tokens, n.tokens[len(n.tokens)-1])
}

// everyText calls f for all texts of the node's arguments and block, but for the
// blocks of children that skip says.
func (n *auditNode) everyText(f func(text string, at spot), skip func(*auditNode) bool) {
	for _, token := range n.tokens[1:n.head] {
		f(token.Text, spotOfToken(token))
	}
	for _, child := range n.children {
		if skip == nil || !skip(child) {
			f(child.name, child.spot)
			child.everyText(f, nil)
		}
	}
}

// parseBlocks reads a Caddyfile as far as Caddy's own parser does, which knows
// no directive. unset names the environment variables that it would need.
func parseBlocks(filename string, content []byte) (blocks []caddyfile.ServerBlock, unset []string, err error) {
	if err := checkText(filename, content); err != nil {
		return nil, nil, err
	}
	content, unset = keepUnset(content)
	defer func() {
		if fault := recover(); fault != nil {
			blocks, err = nil, fmt.Errorf("%s: Caddy's parser fails on this file (%v)", filename, fault)
		}
	}()
	blocks, err = caddyfile.Parse(filename, content)
	switch {
	case errors.Is(err, io.EOF):
		return nil, nil, fmt.Errorf("%s is empty: there is nothing to audit", filename)
	case err != nil && strings.Contains(err.Error(), filename):
		return nil, nil, err
	case err != nil:
		return nil, nil, fmt.Errorf("%s: %w", filename, err)
	case len(blocks) == 0:
		return nil, nil, fmt.Errorf("%s holds no site and no global option: there is nothing to audit", filename)
	}
	return blocks, unset, nil
}

// checkText refuses what is no text, and names the line.
func checkText(filename string, content []byte) error {
	line := 1
	for rest := content; len(rest) > 0; {
		r, size := utf8.DecodeRune(rest)
		if r == 0 || r == utf8.RuneError && size == 1 {
			return fmt.Errorf("%s:%d: a byte that is no text (0x%02x): is this a Caddyfile, or JSON?", filename, line, rest[0])
		}
		if r == '\n' {
			line++
		}
		rest = rest[size:]
	}
	return nil
}

// unsetPrefix marks what stands for an environment variable that is not set. The
// audit runs where the variables of production are not known, and Caddy's parser
// would leave nothing in their places.
const unsetPrefix = "{unset."

// keepUnset puts a marker in the place of each {$NAME} that is not set and has
// no default. One that has a line for itself stands for further lines, and is
// left to be nothing.
func keepUnset(content []byte) (kept []byte, unset []string) {
	for rest := content; ; {
		begin := bytes.Index(rest, []byte("{$"))
		if begin < 0 {
			return append(kept, rest...), unset
		}
		length := bytes.IndexByte(rest[begin:], '}') + 1
		if length == 0 {
			return append(kept, rest...), unset
		}
		name := string(rest[begin+2 : begin+length-1])
		kept = append(kept, rest[:begin]...)
		if _, isSet := os.LookupEnv(name); name == "" || isSet || strings.ContainsAny(name, ": \t\n\"`{#") {
			kept = append(kept, rest[begin:begin+length]...)
		} else {
			if !aloneInLine(kept, rest[begin+length:]) {
				kept = append(kept, unsetPrefix+name+"}"...)
			}
			if !slices.Contains(unset, name) {
				unset = append(unset, name)
			}
		}
		rest = rest[begin+length:]
	}
}

// aloneInLine says whether nothing else stands in the line.
func aloneInLine(before, after []byte) bool {
	line := before[bytes.LastIndexByte(before, '\n')+1:]
	if end := bytes.IndexByte(after, '\n'); end >= 0 {
		after = after[:end]
	}
	return len(bytes.TrimSpace(line)) == 0 && len(bytes.TrimSpace(after)) == 0
}

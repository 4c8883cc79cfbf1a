package edgelimit

import (
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// documents are the Markdown files that users read, as far as they are there.
func documents(t *testing.T) map[string]string {
	t.Helper()
	paths := []string{"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
	err := filepath.WalkDir("docs", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && filepath.Ext(path) == ".md" {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	texts := make(map[string]string)
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		texts[path] = strings.ReplaceAll(string(content), "\r\n", "\n")
	}
	return texts
}

// fencedBlock is a block of code in Markdown.
type fencedBlock struct {
	language string
	line     int // of the fence that opens it
	text     string
}

var fence = regexp.MustCompile("^( *)(```+|~~~+) *([^ `]*)[^`]*$")

// splitMarkdown takes a document apart: its blocks of code, and the prose with
// empty lines where they were.
func splitMarkdown(text string) (blocks []fencedBlock, prose []string) {
	var open *fencedBlock
	var indent, closing string
	for i, line := range strings.Split(text, "\n") {
		parts := fence.FindStringSubmatch(line)
		switch {
		case open == nil && parts != nil:
			open = &fencedBlock{language: parts[3], line: i + 1}
			indent, closing = parts[1], parts[2]
		case open != nil && parts != nil && parts[3] == "" && strings.HasPrefix(parts[2], closing):
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text += strings.TrimPrefix(line, indent) + "\n"
		default:
			prose = append(prose, line)
			continue
		}
		prose = append(prose, "")
	}
	if open != nil { // never closed: all that follows is code
		blocks = append(blocks, *open)
	}
	return blocks, prose
}

func TestSplitMarkdown(t *testing.T) {
	blocks, prose := splitMarkdown("a\n```caddyfile\n:80 {\n}\n```\nb\n1. c\n   ```sh title\n   ls\n     -l\n   ```\n````\n```\n````\n")
	want := []fencedBlock{
		{"caddyfile", 2, ":80 {\n}\n"},
		{"sh", 8, "ls\n  -l\n"},
		{"", 12, "```\n"},
	}
	if len(blocks) != len(want) {
		t.Fatalf("blocks: %+v, want %+v", blocks, want)
	}
	for i := range want {
		if blocks[i] != want[i] {
			t.Errorf("block %d: %+v, want %+v", i, blocks[i], want[i])
		}
	}
	if text := strings.Join(prose, "|"); text != "a|||||b|1. c||||||||" {
		t.Errorf("prose: %s", text)
	}
}

// TestDocumentedCaddyfiles: whoever copies a Caddyfile out of the documentation
// gets one that works, and that `caddy fmt` leaves alone.
func TestDocumentedCaddyfiles(t *testing.T) {
	for path, text := range documents(t) {
		if path == "docs/fleet.md" {
			continue // package redisstore tests it, which this one cannot import
		}
		blocks, _ := splitMarkdown(text)
		found := false
		for _, block := range blocks {
			if !strings.EqualFold(block.language, "caddyfile") {
				if block.language == "" && strings.Contains(block.text, "edge_limit {\n") {
					t.Errorf("%s:%d: this looks like a Caddyfile: say so behind the fence, so that it is tested", path, block.line)
				}
				continue
			}
			found = true
			t.Run(path+":"+strconv.Itoa(block.line), func(t *testing.T) {
				requireWorkingCaddyfile(t, block.text)
			})
		}
		if path == "README.md" && !found {
			t.Error("README.md shows no Caddyfile: it needs one that can be copied")
		}
	}
}

func TestExampleCaddyfile(t *testing.T) {
	content, err := os.ReadFile("example.Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	config := requireWorkingCaddyfile(t, string(content))
	if err := validateJSON(t, config); err != nil {
		t.Errorf("loading: %v", err)
	}
}

func requireWorkingCaddyfile(t *testing.T, text string) []byte {
	t.Helper()
	formatted := caddyfile.Format([]byte(text))
	if string(formatted) != text {
		t.Errorf("caddy fmt would write this as\n%s", formatted)
	}
	config, err := adaptCaddyfile(t, string(formatted))
	if err != nil {
		t.Fatalf("adapting: %v\n%s", err, text)
	}
	return config
}

var (
	inlineCode    = regexp.MustCompile("`[^`]*`")
	inlineLink    = regexp.MustCompile(`\]\(<?([^()\s>]+)>?(?: +"[^"]*")?\)`)
	referenceLink = regexp.MustCompile(`^ {0,3}\[[^\]]+\]: +<?([^\s>]+)>?`)
	heading       = regexp.MustCompile(`^ {0,3}#{1,6} +(.*?) *#*$`)
	explicitID    = regexp.MustCompile(`(?:id|name)="([^"]+)"`)
	linkText      = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
	notInAnchor   = regexp.MustCompile(`[^\p{L}\p{N}_\- ]`)
)

// TestDocumentLinks: what a document refers to in this repository is there, and
// so is the heading.
func TestDocumentLinks(t *testing.T) {
	texts := documents(t)
	anchors := make(map[string]map[string]bool)
	for path, text := range texts {
		anchors[path] = anchorsOf(text)
	}
	for path, text := range texts {
		_, prose := splitMarkdown(text)
		for i, line := range prose {
			line = inlineCode.ReplaceAllString(line, "")
			links := inlineLink.FindAllStringSubmatch(line, -1)
			links = append(links, referenceLink.FindAllStringSubmatch(line, -1)...)
			for _, link := range links {
				if problem := brokenLink(path, link[1], anchors); problem != "" {
					t.Errorf("%s:%d: %s: %s", path, i+1, link[1], problem)
				}
			}
		}
	}
}

// brokenLink says what is wrong with a link from a document, or "".
func brokenLink(from, link string, anchors map[string]map[string]bool) string {
	target, err := url.Parse(link)
	if err != nil {
		return err.Error()
	}
	if target.IsAbs() || target.Host != "" {
		return "" // elsewhere
	}
	if strings.HasPrefix(target.Path, "/") {
		return "a path from the root means something else wherever this is read: write it from here"
	}
	path := from
	if target.Path != "" {
		path = filepath.Join(filepath.Dir(from), filepath.FromSlash(target.Path))
	}
	if strings.HasPrefix(path, "..") {
		return "it leaves the repository"
	}
	if _, err := os.Stat(path); err != nil {
		return "it is not there"
	}
	if known, ok := anchors[path]; ok && target.Fragment != "" && !known[target.Fragment] {
		return "no heading has this anchor"
	}
	return ""
}

// anchorsOf makes the anchors of a document's headings as GitHub does.
func anchorsOf(text string) map[string]bool {
	anchors := make(map[string]bool)
	_, prose := splitMarkdown(text)
	for _, line := range prose {
		for _, id := range explicitID.FindAllStringSubmatch(line, -1) {
			anchors[id[1]] = true
		}
		parts := heading.FindStringSubmatch(line)
		if parts == nil {
			continue
		}
		title := linkText.ReplaceAllString(parts[1], "$1")
		anchor := notInAnchor.ReplaceAllString(strings.ToLower(title), "")
		anchor = strings.ReplaceAll(anchor, " ", "-")
		unique := anchor
		for n := 1; anchors[unique]; n++ {
			unique = anchor + "-" + strconv.Itoa(n)
		}
		anchors[unique] = true
	}
	return anchors
}

func TestAnchors(t *testing.T) {
	anchors := anchorsOf("# nginx in front\n## `hops <n>`: how many?\n## A & B\n### [Link](x.md) here\n## A & B\n```\n# no heading\n```\n<a id=\"kept\"></a>\n")
	for _, want := range []string{"nginx-in-front", "hops-n-how-many", "a--b", "a--b-1", "link-here", "kept"} {
		if !anchors[want] {
			t.Errorf("%s is missing in %v", want, anchors)
		}
	}
	if len(anchors) != 6 {
		t.Errorf("anchors: %v", anchors)
	}
}

package edgelimit

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"html/template"
	"mime"
	"strconv"
	"strings"
)

// The probe's page shows the answer to people. Everything on it that came with
// the request is escaped, and its policy lets nothing but its own style apply.

//go:embed probe_page.html
var probePageText string

//go:embed probe_page.css
var probePageStyle string

var probePage = template.Must(template.New("probe").Parse(probePageText))

// probePagePolicy is the page's Content-Security-Policy. The style is known by
// its hash; scripts, images, forms and frames there are none.
var probePagePolicy = "default-src 'none'; style-src 'sha256-" + hashOf(probePageStyle) + "'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

func hashOf(text string) string {
	digest := sha256.Sum256([]byte(text))
	return base64.StdEncoding.EncodeToString(digest[:])
}

// How the page marks its verdict.
const (
	verdictGood  = "good"
	verdictDoubt = "doubt"
	verdictBad   = "bad"
)

// pageView is what the page shows.
type pageView struct {
	Style         template.CSS
	Verdict       string // good, doubt or bad
	Headline      string
	Resolved      string // the address, or ""
	Source        string
	SourceMeaning string
	Reason        string
	ReasonMeaning string
	Forged        string // what became of the entries that the caller wrote
	Advice        []phrase
	Remark        string

	// Only with detail:
	Detail bool
	Header string
	Passed int
	Stops  []pageStop
	More   bool // the chain goes on further left
}

// pageStop is one place where an address was seen, in the order in which they
// are looked at: the connection first, then the chain from the right.
type pageStop struct {
	Place  string
	Text   string
	Writer string
	Role   string // client, proxy, unreadable or ignored
	Fate   string
}

// page prepares the answer for the page. state is nil where no edge_limit came
// before.
func (p *Probe) page(state *requestState, answer *probeAnswer) *pageView {
	view := &pageView{
		Style: template.CSS(probePageStyle), Verdict: verdictBad, Headline: "Your address is unknown",
		Source: answer.Source, SourceMeaning: sourceMeanings[sourceUnresolved], Advice: phrasesOf(answer.Advice),
	}
	if state == nil {
		return view
	}
	view.SourceMeaning = sourceMeanings[state.source]
	view.Reason, view.ReasonMeaning = answer.Reason, reasonMeanings[state.reason]
	switch spoofIgnored := answer.SpoofIgnored; {
	case spoofIgnored == nil:
		view.Forged = "none came with this request"
	case *spoofIgnored:
		view.Forged = "some came with this request, and none was believed"
	default:
		view.Forged = "they could have been believed: the answer rests on unverified hops"
	}
	if state.resolved() {
		view.Resolved = state.clientText()
		view.Verdict, view.Headline = verdictGood, "You are "+state.clientText()
		if !answer.Healthy {
			view.Verdict, view.Headline = verdictDoubt, "You are "+state.clientText()+", but look here"
		} else if state.source != sourceProof && !state.config.Connection && privateRange(state.client).IsValid() {
			view.Remark = "This is a private address. If your device does not have it, something in front hides you, " +
				"such as a proxy that is not known here, or Docker. Then everybody behind it shares one budget."
		}
	}
	if p.Detail {
		view.Detail, view.Header, view.Passed = true, state.config.Header, answer.TrustedProxyHops
		view.Stops, view.More = state.stops(answer.Chain)
	}
	return view
}

// phrase is a part of a text: words, or something to write into a file.
type phrase struct {
	Text string
	Code bool
}

// phrasesOf takes apart a text in which `code` stands between backticks.
func phrasesOf(text string) (phrases []phrase) {
	for i, part := range strings.Split(text, "`") {
		if part != "" {
			phrases = append(phrases, phrase{part, i%2 == 1})
		}
	}
	return phrases
}

// stops lists where addresses were seen, nearest first. entries are from left to
// right. more says whether there are further ones.
func (s *requestState) stops(entries []probedEntry) (stops []pageStop, more bool) {
	peer := "no address"
	if addr, _ := peerOf(s.peerAddr, nil); addr.IsValid() && !s.onUnix {
		peer = addr.String()
	}
	stops = append(stops, pageStop{
		Place: "The connection", Text: peer, Writer: "seen by this server, so nobody can forge it",
		Role: roleIgnored, Fate: "not believed about others",
	})
	switch {
	case s.peerTrusted:
		stops[0].Role, stops[0].Fate = roleProxy, "a trusted proxy"
	case s.source == sourceConnection:
		stops[0].Role, stops[0].Fate = roleClient, "the client"
	case s.reason == reasonNoAddress:
		stops[0].Role, stops[0].Fate = roleUnreadable, "no address, and not trusted"
	}
	if s.proven {
		stops = append(stops, s.proofStop())
	}
	for n := range entries {
		stops = append(stops, s.entryStop(n, entries[len(entries)-1-n], peer))
	}
	return stops, s.config.moreThan(len(entries), &s.resolution)
}

const (
	roleClient     = "client"
	roleProxy      = "proxy"
	roleUnreadable = "unreadable"
	roleIgnored    = "ignored"
)

func (s *requestState) proofStop() pageStop {
	stop := pageStop{
		Place: "Stated with a proof", Text: s.clientText(), Writer: "written by a holder of the secret",
		Role: roleClient, Fate: "the client",
	}
	if !s.resolved() {
		stop.Role, stop.Fate = roleUnreadable, "no single address"
	}
	return stop
}

// entryStop is the n-th entry of the chain, from the right and from 0.
func (s *requestState) entryStop(n int, entry probedEntry, peer string) pageStop {
	stop := pageStop{
		Place: "Entry " + strconv.Itoa(n+1) + " from the right", Text: shown(entry.Entry),
		Role: roleIgnored, Fate: "ignored",
	}
	switch entry.Writer {
	case "peer":
		stop.Writer = "written by " + peer + ", the peer"
	case "caller":
		stop.Writer = "written by the caller, or by nobody known"
	case "unverified":
		stop.Writer = "written by whoever came before: not verified"
	default:
		stop.Writer = "written by " + entry.Writer // a trusted proxy's address, in its canonical form
	}
	switch {
	case !entry.Read:
	case n < int(s.passed) && s.unverified:
		stop.Role, stop.Fate = roleProxy, "counted as a proxy, not verified"
	case n < int(s.passed):
		stop.Role, stop.Fate = roleProxy, "a trusted proxy, passed over"
	case s.resolved():
		stop.Role, stop.Fate = roleClient, "the client"
	case s.reason == reasonNotSingle:
		stop.Role, stop.Fate = roleUnreadable, "not the only one"
	default:
		stop.Role, stop.Fate = roleUnreadable, "no address"
	}
	return stop
}

// maxShown is how much of an entry the page shows, in bytes.
const maxShown = 120

// shown is an entry as the page shows it.
func shown(entry string) string {
	if entry == "" {
		return "(empty)"
	}
	return printable(entry, maxShown)
}

// printable is the text of others as it can be shown: not longer than limit
// bytes, and with all that is invisible, that would turn the writing round or
// steer a terminal, escaped.
func printable(text string, limit int) string {
	end := ""
	if len(text) > limit {
		text, end = text[:limit], " ..."
	}
	for i := range len(text) {
		if text[i] < ' ' || text[i] > '~' {
			return strconv.QuoteToASCII(text) + end
		}
	}
	return text + end
}

// moreThan says whether the chain has more than n entries.
func (c *Client) moreThan(n int, res *resolution) bool {
	return !c.shorterThan(n+1, res.lines)
}

var sourceMeanings = [sources]string{
	sourceConnection:     "whoever opened the connection; no header was believed",
	sourceServer:         "what the proxies that this server trusts have written",
	sourceTrustedProxies: "the first address, from the right, that is no trusted proxy",
	sourceHops:           "as many entries from the right as there are proxies",
	sourceSingleValue:    "the only address in the header, written by a trusted proxy",
	sourceProof:          "stated by a sender that knows the secret",
	sourceUnresolved:     "nobody could be believed",
}

var reasonMeanings = [reasons]string{
	reasonMissingHeader:   "the address should have been in a header that did not come",
	reasonMalformed:       "where the address should stand, there is none",
	reasonNotSingle:       "there should be one address, and there are several",
	reasonNoAddress:       "the connection itself has no address",
	reasonShortChain:      "fewer proxies than configured have written",
	reasonUnverifiedHop:   "an entry that should be a proxy's is not",
	reasonUntrustedHeader: "a neighbour that is not trusted sends a list of addresses, as a proxy does",
}

// maxMediaRanges bounds how much of Accept is read: browsers send about eight.
const maxMediaRanges = 32

// prefersHTML says whether text/html is wanted more than application/json.
// Whoever does not care gets JSON.
func prefersHTML(accept []string) bool {
	var html, json preference
	ranges := 0
	for _, line := range accept {
		for item := range strings.SplitSeq(line, ",") {
			if ranges++; ranges > maxMediaRanges {
				return false
			}
			mediaType, parameters, err := mime.ParseMediaType(item)
			if err != nil {
				continue
			}
			quality := 1.0
			if q, ok := parameters["q"]; ok {
				if quality, err = strconv.ParseFloat(q, 64); err != nil {
					continue
				}
			}
			html.consider(mediaType, quality, "text/html")
			json.consider(mediaType, quality, "application/json")
		}
	}
	return html.quality > json.quality
}

// preference is how much a media type is wanted, by the most specific range that
// contains it.
type preference struct {
	quality     float64
	specificity int
}

func (p *preference) consider(mediaRange string, quality float64, mediaType string) {
	kind, _, _ := strings.Cut(mediaType, "/")
	specificity := 0
	switch mediaRange {
	case mediaType:
		specificity = 3
	case kind + "/*":
		specificity = 2
	case "*/*":
		specificity = 1
	}
	if specificity > p.specificity {
		p.quality, p.specificity = quality, specificity
	}
}
